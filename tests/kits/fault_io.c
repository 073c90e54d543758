// SPDX-License-Identifier: Apache-2.0
//
// The disk in memory that breaks on demand.
#include "tests/kits/fault_io.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct fault_io *self(struct kvq_io *io)
{
    return (struct fault_io *)io;
}

// splitmix64
static uint64_t next_random(struct fault_io *f)
{
    uint64_t z = f->random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t fault_number(struct fault_io *f, uint64_t below)
{
    return next_random(f) % below;
}

static bool chance(struct fault_io *f, uint32_t percent)
{
    return percent && next_random(f) % 100 < percent;
}

static void *need(void *p)
{
    if (!p)
        abort();
    return p;
}

// ---- Files ----

static void resize(uint8_t **data, uint64_t *bytes, uint64_t to)
{
    if (to > *bytes || !*data) {
        *data = need(realloc(*data, to + 1));
        memset(*data + *bytes, 0, to > *bytes ? to - *bytes : 0);
    }
    *bytes = to;
}

static void put(uint8_t **data, uint64_t *bytes, uint64_t at, const uint8_t *from, uint64_t n)
{
    if (at + n > *bytes)
        resize(data, bytes, at + n);
    memcpy(*data + at, from, n);
}

static void forget_writes(struct fault_file *file)
{
    while (file->writes) {
        struct fault_write *w = file->writes;
        file->writes = w->next;
        free(w->bytes);
        free(w);
    }
    file->last = &file->writes;
}

void fault_settle(struct fault_file *file)
{
    forget_writes(file);
    file->synced = need(realloc(file->synced, file->bytes + 1));
    if (file->bytes)
        memcpy(file->synced, file->data, file->bytes);
    file->synced_bytes = file->bytes;
}

// Makes what is synced what is now, and settles the writes on it.
static void apply_write(struct fault_file *file, const struct fault_write *w)
{
    if (w->truncate)
        resize(&file->synced, &file->synced_bytes, w->at);
    else
        put(&file->synced, &file->synced_bytes, w->at, w->bytes, w->n);
}

static void sync_file(struct fault_file *file)
{
    for (struct fault_write *w = file->writes; w; w = w->next)
        apply_write(file, w);
    forget_writes(file);
}

static void unuse(struct fault_file *file)
{
    if (!file || --file->uses > 0)
        return;
    forget_writes(file);
    free(file->data);
    free(file->synced);
    free(file);
}

static struct fault_file *use(struct fault_file *file)
{
    if (file)
        file->uses++;
    return file;
}

static uint64_t physical_of(const struct fault_file *file)
{
    uint64_t n = file->bytes > file->allocated ? file->bytes : file->allocated;
    return (n + KVQ_IO_PAGE - 1) / KVQ_IO_PAGE * KVQ_IO_PAGE;
}

static uint64_t physical(struct fault_io *f)
{
    uint64_t sum = 0;
    for (int i = 0; i < FAULT_FILES; i++)
        sum += f->now[i].file ? physical_of(f->now[i].file) : 0;
    f->peak = sum > f->peak ? sum : f->peak;
    return sum;
}

uint64_t fault_physical(struct fault_io *f)
{
    pthread_mutex_lock(&f->lock);
    uint64_t sum = physical(f);
    pthread_mutex_unlock(&f->lock);
    return sum;
}

// ---- Names ----

static struct fault_name *find(struct fault_name *names, const char *path)
{
    for (int i = 0; i < FAULT_FILES; i++)
        if (names[i].file && strcmp(names[i].path, path) == 0)
            return &names[i];
    return NULL;
}

struct fault_file *fault_find(struct fault_io *f, const char *path)
{
    struct fault_name *name = find(f->now, path);
    return name ? name->file : NULL;
}

// path is file, or (NULL) is gone.
static void set_name(struct fault_name *names, const char *path, struct fault_file *file)
{
    struct fault_name *name = find(names, path);
    use(file);
    if (name) {
        unuse(name->file);
        name->file = file;
        return;
    }
    for (int i = 0; i < FAULT_FILES && file; i++)
        if (!names[i].file) {
            snprintf(names[i].path, FAULT_PATH, "%s", path);
            names[i].file = file;
            return;
        }
    assert(!file && "more names than FAULT_FILES");
}

static void change_name(struct fault_io *f, const char *path, struct fault_file *file,
                        uint32_t group)
{
    struct fault_change *change = need(calloc(1, sizeof *change));
    snprintf(change->name.path, FAULT_PATH, "%s", path);
    change->name.file = use(file);
    change->group = group;
    *f->last = change;
    f->last = &change->next;
    set_name(f->now, path, file);
}

static void free_change(struct fault_change *change)
{
    unuse(change->name.file);
    free(change);
}

// ---- What goes wrong ----

// Before anything that changes the disk: whether it fails, and with what.
static int before_change(struct fault_io *f)
{
    if (f->crashed || ++f->n_changes == f->crash_at_change) {
        f->crashed = true;
        return -EIO;
    }
    return f->read_only ? -EROFS : 0;
}

static bool hit(const struct fault_io *f, uint64_t from, uint64_t now)
{
    return from && now >= from && (f->fail_count == 0 || now < from + f->fail_count);
}

static int no_room(const struct fault_io *f)
{
    return f->full_with ? -f->full_with : -ENOSPC;
}

// ---- The table ----

static int fault_open_file(struct kvq_io *io, const char *path, unsigned flags)
{
    struct fault_io *f = self(io);
    struct fault_name *name;
    int rc = 0, handle = 0;
    pthread_mutex_lock(&f->lock);
    name = find(f->now, path);
    struct fault_file *file = name ? name->file : NULL;
    if (f->crashed)
        rc = -EIO;
    else if (f->read_only && flags & KVQ_IO_WRITE)
        rc = -EROFS;
    else if (file && flags & KVQ_IO_NEW)
        rc = -EEXIST;
    else if (!file && !(flags & (KVQ_IO_CREATE | KVQ_IO_NEW)))
        rc = -ENOENT;
    else if (!file)
        rc = f->no_new ? no_room(f) : before_change(f);
    if (rc == 0 && !file) {
        file = need(calloc(1, sizeof *file));
        file->last = &file->writes;
        change_name(f, path, file, ++f->groups);
    }
    while (rc == 0 && f->handles[handle])
        assert(++handle < FAULT_HANDLES && "handles leak");
    if (rc == 0)
        f->handles[handle] = use(file);
    pthread_mutex_unlock(&f->lock);
    return rc ? rc : handle;
}

static void fault_close_file(struct kvq_io *io, int handle)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    assert(handle >= 0 && f->handles[handle]);
    if (f->locks[handle])
        f->handles[handle]->locked = false;
    f->locks[handle] = false;
    unuse(f->handles[handle]);
    f->handles[handle] = NULL;
    pthread_mutex_unlock(&f->lock);
}

static int64_t fault_read(struct kvq_io *io, int handle, void *data, size_t n, uint64_t at)
{
    struct fault_io *f = self(io);
    int64_t rc = 0;
    pthread_mutex_lock(&f->lock);
    const struct fault_file *file = f->handles[handle];
    if (f->crashed) {
        rc = -EIO;
    } else if (chance(f, f->interrupt_percent)) {
        rc = -EINTR;
    } else if (hit(f, f->fail_read, ++f->n_reads)) {
        rc = -f->fail_with;
    } else if (f->sick == file && at <= f->sick_at && f->sick_at - at < n) {
        rc = -EIO;
    } else if (at < file->bytes && n > 0) {
        n = file->bytes - at < n ? (size_t)(file->bytes - at) : n;
        if (chance(f, f->short_percent))
            n = 1 + next_random(f) % n;
        memcpy(data, file->data + at, n);
        rc = (int64_t)n;
    }
    pthread_mutex_unlock(&f->lock);
    return rc;
}

// How many of n bytes there is room for.
static size_t fitting(struct fault_io *f, const struct fault_file *file, uint64_t at, size_t n)
{
    uint64_t others = physical(f) - physical_of(file);
    uint64_t room = f->capacity > others ? f->capacity - others : 0;
    room = room > physical_of(file) ? room : physical_of(file);
    return f->capacity == 0 || at + n <= room ? n : at < room ? (size_t)(room - at) : 0;
}

static int64_t write_now(struct fault_io *f, struct fault_file *file, const void *data, size_t n,
                         uint64_t at)
{
    int64_t rc = before_change(f);
    if (rc)
        return rc;
    if (chance(f, f->interrupt_percent))
        return -EINTR;
    if (hit(f, f->fail_write, ++f->n_writes))
        return -f->fail_with;
    if (n > 1 && chance(f, f->short_percent))
        n = 1 + next_random(f) % n;
    n = fitting(f, file, at, n);
    if (n == 0)
        return no_room(f);
    struct fault_write *w = need(calloc(1, sizeof *w));
    w->at = at;
    w->n = n;
    w->bytes = need(malloc(n));
    memcpy(w->bytes, data, n);
    *file->last = w;
    file->last = &w->next;
    put(&file->data, &file->bytes, at, data, n);
    (void)physical(f);
    return (int64_t)n;
}

static int64_t fault_write(struct kvq_io *io, int handle, const void *data, size_t n, uint64_t at)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    int64_t rc = write_now(f, f->handles[handle], data, n, at);
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static void survive(struct fault_io *f, struct fault_file *file, const struct fault_write *w,
                    uint32_t keep);

// A sync that failed: some of what was to be written, or all or nothing of it, is lost, and no
// later sync writes it.
static void lose_writes(struct fault_io *f, struct fault_file *file)
{
    static const uint32_t keeps[] = {0, 30, 100};
    uint32_t keep = keeps[fault_number(f, 3)];
    for (struct fault_write *w = file->writes; w; w = w->next)
        survive(f, file, w, keep);
    forget_writes(file);
}

// Whether a sync may happen.
static int before_sync(struct fault_io *f)
{
    if (f->crashed || ++f->n_syncs == f->crash_at_sync) {
        f->crashed = true;
        return -EIO;
    }
    return chance(f, f->interrupt_percent)    ? -EINTR
           : hit(f, f->fail_sync, f->n_syncs) ? -f->fail_with
                                              : 0;
}

static int fault_sync(struct kvq_io *io, int handle)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    int rc = before_sync(f);
    if (rc == 0)
        sync_file(f->handles[handle]);
    else if (rc != -EINTR && !f->crashed)
        lose_writes(f, f->handles[handle]);
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static int fault_truncate(struct kvq_io *io, int handle, uint64_t bytes)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    struct fault_file *file = f->handles[handle];
    int rc = before_change(f);
    if (rc == 0) {
        struct fault_write *w = need(calloc(1, sizeof *w));
        w->truncate = true;
        w->at = bytes;
        *file->last = w;
        file->last = &w->next;
        resize(&file->data, &file->bytes, bytes);
        file->allocated = 0;
    }
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static int fault_allocate(struct kvq_io *io, int handle, uint64_t bytes)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    struct fault_file *file = f->handles[handle];
    int rc = before_change(f);
    uint64_t some = rc ? 0 : fitting(f, file, 0, bytes) / KVQ_IO_PAGE * KVQ_IO_PAGE;
    if (rc == 0 && some < bytes) // the file keeps what there was, as on ext4
        rc = no_room(f);
    if (rc == 0 || rc == no_room(f)) {
        some = rc ? some : bytes;
        file->allocated = some > file->allocated ? some : file->allocated;
    }
    (void)physical(f);
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static void fault_will_read(struct kvq_io *io, int handle, uint64_t at, uint64_t n)
{
    (void)io;
    (void)handle;
    (void)at;
    (void)n;
}

static int fault_status(struct kvq_io *io, int handle, struct kvq_io_status *status)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    const struct fault_file *file = f->handles[handle];
    *status = (struct kvq_io_status){file->bytes, physical_of(file)};
    pthread_mutex_unlock(&f->lock);
    return f->crashed ? -EIO : 0;
}

static int fault_lock(struct kvq_io *io, int handle)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    struct fault_file *file = f->handles[handle];
    int rc = f->crashed                          ? -EIO
             : chance(f, f->interrupt_percent)   ? -EINTR
             : file->locked && !f->locks[handle] ? -EWOULDBLOCK
                                                 : 0;
    if (rc == 0)
        file->locked = f->locks[handle] = true;
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static int rename_file(struct kvq_io *io, const char *from, const char *to, bool replaces)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    struct fault_file *file = fault_find(f, from);
    int rc = f->crashed ? -EIO : file ? before_change(f) : -ENOENT;
    if (rc == 0 && !replaces && fault_find(f, to))
        rc = -EEXIST;
    if (rc == 0) {
        uint32_t group = ++f->groups;
        change_name(f, to, file, group);
        change_name(f, from, NULL, group);
    }
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static int fault_rename(struct kvq_io *io, const char *from, const char *to)
{
    return rename_file(io, from, to, true);
}

static int fault_rename_new(struct kvq_io *io, const char *from, const char *to)
{
    return rename_file(io, from, to, false);
}

static int fault_unlink(struct kvq_io *io, const char *path)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    int rc = f->crashed ? -EIO : fault_find(f, path) ? before_change(f) : -ENOENT;
    if (rc == 0)
        change_name(f, path, NULL, ++f->groups);
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static int fault_make_dir(struct kvq_io *io, const char *path)
{
    struct fault_io *f = self(io);
    if (f->crashed)
        return -EIO;
    if (f->folder_made || !f->new_folder || strcmp(path, f->new_folder) != 0)
        return -EEXIST;
    f->folder_made = true;
    return 0;
}

static int fault_sync_dir(struct kvq_io *io, const char *path)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    int rc = before_sync(f);
    f->folder_synced |= rc == 0 && f->folder_made && strcmp(path, f->above) == 0;
    while (rc == 0 && f->changes) {
        struct fault_change *change = f->changes;
        f->changes = change->next;
        set_name(f->durable, change->name.path, change->name.file);
        free_change(change);
    }
    if (rc == 0)
        f->last = &f->changes;
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static int fault_list(struct kvq_io *io, const char *path,
                      int (*each)(void *context, const char *name), void *context)
{
    struct fault_io *f = self(io);
    size_t n = strlen(path);
    int rc = f->crashed ? -EIO : 0;
    for (int i = 0; i < FAULT_FILES && rc == 0; i++) {
        const struct fault_name *name = &f->now[i];
        if (name->file && strncmp(name->path, path, n) == 0 && name->path[n] == '/')
            rc = each(context, name->path + n + 1);
    }
    return rc;
}

static int fault_space(struct kvq_io *io, const char *path, uint64_t *free_bytes)
{
    struct fault_io *f = self(io);
    (void)path;
    pthread_mutex_lock(&f->lock);
    uint64_t used = physical(f), all = f->capacity ? f->capacity : 1ull << 40;
    int rc = chance(f, f->interrupt_percent) ? -EINTR : 0;
    pthread_mutex_unlock(&f->lock);
    if (rc == 0)
        *free_bytes = all > used ? all - used : 0;
    return rc;
}

static int fault_random(struct kvq_io *io, void *data, size_t n)
{
    struct fault_io *f = self(io);
    pthread_mutex_lock(&f->lock);
    int rc = chance(f, f->interrupt_percent) ? -EINTR : 0;
    for (size_t i = 0; i < n && rc == 0; i++)
        ((uint8_t *)data)[i] = (uint8_t)next_random(f);
    pthread_mutex_unlock(&f->lock);
    return rc;
}

// ---- Opening, closing, crashing ----

void fault_open(struct fault_io *f, uint64_t seed)
{
    memset(f, 0, sizeof *f);
    f->random = seed;
    f->last = &f->changes;
    pthread_mutex_init(&f->lock, NULL);
    f->io = (struct kvq_io){.open = fault_open_file,
                            .close = fault_close_file,
                            .read = fault_read,
                            .write = fault_write,
                            .sync = fault_sync,
                            .truncate = fault_truncate,
                            .allocate = fault_allocate,
                            .will_read = fault_will_read,
                            .status = fault_status,
                            .lock = fault_lock,
                            .rename = fault_rename,
                            .rename_new = fault_rename_new,
                            .unlink = fault_unlink,
                            .make_dir = fault_make_dir,
                            .sync_dir = fault_sync_dir,
                            .list = fault_list,
                            .space = fault_space,
                            .random = fault_random};
}

static void forget_changes(struct fault_io *f)
{
    while (f->changes) {
        struct fault_change *change = f->changes;
        f->changes = change->next;
        free_change(change);
    }
    f->last = &f->changes;
}

void fault_close(struct fault_io *f)
{
    forget_changes(f);
    for (int i = 0; i < FAULT_FILES; i++) {
        unuse(f->now[i].file);
        unuse(f->durable[i].file);
    }
    for (int i = 0; i < FAULT_HANDLES; i++)
        assert(!f->handles[i] && "a handle leaked");
    pthread_mutex_destroy(&f->lock);
}

void fault_reset_counts(struct fault_io *f)
{
    f->n_syncs = f->n_changes = f->n_writes = f->n_reads = 0;
    f->crash_at_sync = f->crash_at_change = 0;
    f->fail_write = f->fail_sync = f->fail_read = f->fail_count = 0;
}

// One write that was not synced: all of it, some sectors of it, or nothing.
static void survive(struct fault_io *f, struct fault_file *file, const struct fault_write *w,
                    uint32_t keep)
{
    if (chance(f, keep)) {
        apply_write(file, w);
        return;
    }
    if (w->truncate || f->lose_all || chance(f, 50))
        return;
    for (uint64_t done = 0; done < w->n;) {
        uint64_t at = w->at + done, to = (at / FAULT_SECTOR + 1) * FAULT_SECTOR;
        uint64_t some = to - at < w->n - done ? to - at : w->n - done;
        if (chance(f, 50))
            put(&file->synced, &file->synced_bytes, at, w->bytes + done, some);
        done += some;
    }
}

static void crash_file(struct fault_io *f, struct fault_file *file, uint32_t keep)
{
    for (struct fault_write *w = file->writes; w; w = w->next)
        survive(f, file, w, keep);
    forget_writes(file);
    file->bytes = 0;
    if (file->synced)
        put(&file->data, &file->bytes, 0, file->synced, file->synced_bytes);
    file->allocated = 0;
    file->locked = false;
}

// What is in a folder goes with its name.
static void lose_folder(struct fault_io *f)
{
    size_t n = f->new_folder ? strlen(f->new_folder) : 0;
    if (n == 0 || f->folder_synced)
        return;
    for (int i = 0; i < FAULT_FILES; i++)
        if (f->durable[i].file && strncmp(f->durable[i].path, f->new_folder, n) == 0)
            set_name(f->durable, f->durable[i].path, NULL);
    f->folder_made = false;
}

void fault_crash(struct fault_io *f)
{
    // Some crashes lose everything that was not synced, some nothing, most this and that.
    static const uint32_t keeps[] = {0, 50, 50, 90, 100};
    uint32_t keep = f->lose_all ? 0 : keeps[fault_number(f, 5)];
    uint32_t decided = 0;
    bool survives = false;
    for (struct fault_change *change = f->changes; change; change = change->next) {
        if (change->group != decided)
            survives = chance(f, keep);
        decided = change->group;
        if (survives)
            set_name(f->durable, change->name.path, change->name.file);
    }
    forget_changes(f);
    lose_folder(f);
    for (int i = 0; i < FAULT_FILES; i++) {
        unuse(f->now[i].file);
        f->now[i] = f->durable[i];
        use(f->now[i].file);
    }
    for (int i = 0; i < FAULT_FILES; i++)
        if (f->now[i].file)
            crash_file(f, f->now[i].file, keep);
    f->crashed = false;
    fault_reset_counts(f);
}

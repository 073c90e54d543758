// SPDX-License-Identifier: Apache-2.0
//
// See bundle.h. A bundle is a head, as many entries as it says, and the images, each from a
// multiple of 64 bytes on.
#include "kernels/cuda/bundle.h"

#include <elf.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/attend.h"

enum { MAGIC = 0x4b51564b, VERSION = 1, ALIGNMENT = 64 }; // "KVQK"

struct head {
    uint32_t magic, version, n_images, pad;
};

struct entry {
    uint64_t offset, bytes;
    uint32_t capability, only; // as in struct kvq_gpu_image
    char name[40];
};

void kvq_gpu_kernels_text(char text[KVQ_GPU_KERNELS_TEXT])
{
    snprintf(text, KVQ_GPU_KERNELS_TEXT,
             "attend %s args %zu session %zu tile %zu item %zu page %zu recipe %zu book %zu",
             KVQ_GPU_KERNELS_SOURCES, sizeof(struct kvq_gpu_attend_args),
             sizeof(struct kvq_gpu_session), sizeof(struct kvq_gpu_tile),
             sizeof(struct kvq_gpu_item), sizeof(struct kvq_page), sizeof(struct kvq_recipe),
             sizeof(struct kvq_book));
}

// ---- Writing ----

static size_t image_bytes(const struct kvq_gpu_image *image)
{
    return (size_t)((const uint8_t *)image->end - (const uint8_t *)image->bytes);
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static size_t heads_bytes(size_t n)
{
    return aligned(sizeof(struct head) + n * sizeof(struct entry));
}

size_t kvq_gpu_bundle_bytes(const struct kvq_gpu_image *images, int capability)
{
    size_t bytes = 0, n = 0;
    for (const struct kvq_gpu_image *i = images; i->name; i++)
        if (i->capability == capability) {
            bytes += aligned(image_bytes(i));
            n++;
        }
    return n ? heads_bytes(n) + bytes : 0;
}

void kvq_gpu_bundle_write(const struct kvq_gpu_image *images, int capability, void *bundle)
{
    struct head head = {.magic = MAGIC, .version = VERSION};
    uint8_t *out = bundle;
    for (const struct kvq_gpu_image *i = images; i->name; i++)
        head.n_images += i->capability == capability;
    size_t at = heads_bytes(head.n_images), next = sizeof head;
    memset(out, 0, at);
    memcpy(out, &head, sizeof head);
    for (const struct kvq_gpu_image *i = images; i->name; i++) {
        if (i->capability != capability)
            continue;
        struct entry entry = {.offset = at,
                              .bytes = image_bytes(i),
                              .capability = (uint32_t)i->capability,
                              .only = i->only};
        snprintf(entry.name, sizeof entry.name, "%s", i->name);
        memcpy(out + next, &entry, sizeof entry);
        memcpy(out + at, i->bytes, entry.bytes);
        next += sizeof entry;
        memset(out + at + entry.bytes, 0, aligned(entry.bytes) - entry.bytes);
        at += aligned(entry.bytes);
    }
}

// ---- Reading ----

static bool fits(uint64_t offset, uint64_t bytes, uint64_t all)
{
    return offset <= all && bytes <= all - offset;
}

// The driver is told no size: it goes by the tables of the image, which is an ELF file.
static bool is_whole(const uint8_t *image, uint64_t bytes)
{
    Elf64_Ehdr e;
    if (bytes < sizeof e)
        return false;
    memcpy(&e, image, sizeof e);
    if (memcmp(e.e_ident, ELFMAG, SELFMAG) != 0 || e.e_ident[EI_CLASS] != ELFCLASS64 ||
        !fits(e.e_phoff, (uint64_t)e.e_phnum * e.e_phentsize, bytes) ||
        !fits(e.e_shoff, (uint64_t)e.e_shnum * e.e_shentsize, bytes) ||
        (e.e_shnum && e.e_shentsize != sizeof(Elf64_Shdr)))
        return false;
    for (uint32_t i = 0; i < e.e_shnum; i++) {
        Elf64_Shdr s;
        memcpy(&s, image + e.e_shoff + i * sizeof s, sizeof s);
        if (s.sh_type != SHT_NOBITS && !fits(s.sh_offset, s.sh_size, bytes))
            return false;
    }
    return true;
}

static int refuse(const char *why, char *text, size_t n)
{
    snprintf(text, n,
             "the kernels that the daemon hands over cannot be used: %s; use the libkvq that "
             "came with the daemon",
             why);
    return -1;
}

// Entry i as an image, with its name in `name`.
static int read_entry(const uint8_t *bundle, uint64_t bytes, uint32_t i, struct entry *e,
                      char *text, size_t n)
{
    memcpy(e, bundle + sizeof(struct head) + i * sizeof *e, sizeof *e);
    e->name[sizeof e->name - 1] = 0;
    if (e->offset % ALIGNMENT || !fits(e->offset, e->bytes, bytes))
        return refuse("an image lies outside of them", text, n);
    if (!is_whole(bundle + e->offset, e->bytes))
        return refuse("an image is cut off, or is no cubin", text, n);
    return 0;
}

int kvq_gpu_open_bundle(struct kvq_gpu *gpu, const struct kvq_gpu_driver *driver,
                        const void *bundle, size_t bytes, char *text, size_t n)
{
    struct kvq_gpu_image images[KVQ_GPU_MAX_MODULES + 1] = {0};
    struct entry entries[KVQ_GPU_MAX_MODULES];
    struct head head;
    if (driver->kernels_inside && bytes == 0)
        return kvq_gpu_open_images(gpu, driver, NULL, text, n);
    memset(gpu, 0, sizeof *gpu);
    if (driver->kernels_inside || bytes < sizeof head)
        return refuse("the driver has others, or there are none", text, n);
    memcpy(&head, bundle, sizeof head);
    if (head.magic != MAGIC || head.version != VERSION)
        return refuse("they have another form", text, n);
    if (head.n_images == 0 || head.n_images > KVQ_GPU_MAX_MODULES ||
        bytes < heads_bytes(head.n_images))
        return refuse("their number of images is wrong", text, n);
    for (uint32_t i = 0; i < head.n_images; i++) {
        if (read_entry(bundle, bytes, i, &entries[i], text, n))
            return -1;
        const uint8_t *at = (const uint8_t *)bundle + entries[i].offset;
        images[i] = (struct kvq_gpu_image){(int)entries[i].capability, entries[i].only != 0,
                                           entries[i].name, at, at + entries[i].bytes};
    }
    return kvq_gpu_open_images(gpu, driver, images, text, n);
}

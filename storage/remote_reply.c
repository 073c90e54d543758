// SPDX-License-Identifier: Apache-2.0
//
// Replies of an S3-compatible store, read with expat. Only the fields that are used are looked at:
// those of the document's root, and those of the lists' elements one level below.
#include "storage/remote_reply.h"

#include <assert.h>
#include <expat.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"

enum { MAX_DEPTH = 16 };

enum field_type { TEXT, NUMBER32, NUMBER64, FLAG };

// Where an element's text goes: `level` 2 is below the root, 3 below a list's element.
struct field {
    const char *name;
    int level;
    enum field_type type;
    size_t at, size;
};

#define IN(type, member) offsetof(struct type, member), sizeof((struct type *)0)->member

static const struct field fields[] = {
    {"Code", 2, TEXT, IN(kvq__reply, code)},
    {"Message", 2, TEXT, IN(kvq__reply, message)},
    {"UploadId", 2, TEXT, IN(kvq__reply, upload)},
    {"NextContinuationToken", 2, TEXT, IN(kvq__reply, next)},
    {"NextPartNumberMarker", 2, NUMBER32, IN(kvq__reply, next_number)},
    {"IsTruncated", 2, FLAG, IN(kvq__reply, more)},
    {"Key", 3, TEXT, IN(kvq__reply_item, key)},
    {"UploadId", 3, TEXT, IN(kvq__reply_item, upload)},
    {"ETag", 3, TEXT, IN(kvq__reply_item, etag)},
    {"LastModified", 3, TEXT, IN(kvq__reply_item, modified)},
    {"Size", 3, NUMBER64, IN(kvq__reply_item, bytes)},
    {"PartNumber", 3, NUMBER32, IN(kvq__reply_item, number)},
};

struct reader {
    XML_Parser parser;
    struct kvq__reply *out;
    struct kvq__reply_item item;
    int (*each)(void *context, const struct kvq__reply_item *item);
    void *context;
    const char *why;
    int rc, depth;
    uint32_t items;
    const struct field *field; // whose text is being read
    char text[1100];
    size_t used;
};

static void stop_parsing(struct reader *r, int rc, const char *why)
{
    if (r->rc == 0) {
        r->rc = rc;
        r->why = why;
    }
    XML_StopParser(r->parser, XML_FALSE);
}

static bool is_list_element(const char *name)
{
    return strcmp(name, "Part") == 0 || strcmp(name, "Contents") == 0 ||
           strcmp(name, "Upload") == 0;
}

static const struct field *find_field(const char *name, int level)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].level == level && strcmp(fields[i].name, name) == 0)
            return &fields[i];
    }
    return NULL;
}

static void on_start(void *context, const XML_Char *name, const XML_Char **attributes)
{
    struct reader *r = context;
    (void)attributes;
    if (r->rc != 0) // expat may still call after it was told to stop
        return;
    r->depth++;
    if (r->depth > MAX_DEPTH)
        return stop_parsing(r, KVQ_E_REMOTE, "elements are nested too deep");
    if (r->field)
        return stop_parsing(r, KVQ_E_REMOTE, "there are elements where there should be text");
    if (r->depth == 1) {
        size_t n = strnlen(name, sizeof r->out->root - 1);
        memcpy(r->out->root, name, n);
        r->out->root[n] = '\0';
    } else if (r->depth == 2 && is_list_element(name)) {
        memset(&r->item, 0, sizeof r->item);
        assert(strlen(name) < sizeof r->item.kind);
        memcpy(r->item.kind, name, strlen(name));
    }
    if (r->depth == 2 || (r->depth == 3 && r->item.kind[0]))
        r->field = find_field(name, r->depth);
    r->used = 0;
}

static void on_text(void *context, const XML_Char *text, int n)
{
    struct reader *r = context;
    if (!r->field || r->rc != 0)
        return;
    assert(r->used < sizeof r->text);
    size_t room = sizeof r->text - 1 - r->used;
    size_t take = (size_t)n < room ? (size_t)n : room;
    // A message for people may be cut; a key or an id that is cut would be another one.
    if (take < (size_t)n && r->field->at != offsetof(struct kvq__reply, message))
        return stop_parsing(r, KVQ_E_REMOTE, "a field is too long");
    memcpy(r->text + r->used, text, take);
    r->used += take;
}

bool kvq__reply_number(const char *digits, uint64_t max, uint64_t *out)
{
    uint64_t value = 0;
    if (*digits == '\0')
        return false;
    for (; *digits; digits++) {
        if (*digits < '0' || *digits > '9')
            return false;
        uint64_t digit = (uint64_t)(*digits - '0');
        if (value > (max - digit) / 10 || digit > max)
            return false;
        value = value * 10 + digit;
    }
    *out = value;
    return true;
}

static void store_text(struct reader *r, const struct field *f, char *to)
{
    size_t n = r->used;
    if (n >= f->size && f->at != offsetof(struct kvq__reply, message))
        return stop_parsing(r, KVQ_E_REMOTE, "a field is too long");
    n = n < f->size ? n : f->size - 1;
    memcpy(to, r->text, n);
    to[n] = '\0';
}

static void store_field(struct reader *r, const struct field *f)
{
    char *base = f->level == 2 ? (char *)r->out : (char *)&r->item;
    uint64_t value = 0;
    assert(f->level == 2 || r->item.kind[0]);
    r->text[r->used] = '\0';
    switch (f->type) {
    case TEXT:
        return store_text(r, f, base + f->at);
    case FLAG:
        *(bool *)(base + f->at) = strcmp(r->text, "true") == 0;
        return;
    case NUMBER32:
        if (!kvq__reply_number(r->text, UINT32_MAX, &value))
            return stop_parsing(r, KVQ_E_REMOTE, "a number is none");
        *(uint32_t *)(void *)(base + f->at) = (uint32_t)value;
        return;
    case NUMBER64:
        if (!kvq__reply_number(r->text, INT64_MAX, &value))
            return stop_parsing(r, KVQ_E_REMOTE, "a number is none");
        *(uint64_t *)(void *)(base + f->at) = value;
        return;
    }
}

static void end_item(struct reader *r)
{
    if (++r->items > KVQ__REPLY_ITEMS)
        return stop_parsing(r, KVQ_E_REMOTE, "the list is longer than 1000");
    int rc = r->each ? r->each(r->context, &r->item) : 0;
    if (rc != 0)
        stop_parsing(r, rc, "the call was ended by its caller");
    r->item.kind[0] = '\0';
}

static void on_end(void *context, const XML_Char *name)
{
    struct reader *r = context;
    (void)name;
    if (r->rc != 0)
        return;
    assert(r->depth > 0);
    if (r->field)
        store_field(r, r->field);
    r->field = NULL;
    if (r->rc == 0 && r->depth == 2 && r->item.kind[0])
        end_item(r);
    r->depth--;
}

static void on_doctype(void *context, const XML_Char *name, const XML_Char *system_id,
                       const XML_Char *public_id, int internal)
{
    (void)name, (void)system_id, (void)public_id, (void)internal;
    stop_parsing(context, KVQ_E_REMOTE, "it declares a document type");
}

int kvq__reply_parse(const void *data, size_t n, struct kvq__reply *out,
                     int (*each)(void *context, const struct kvq__reply_item *item), void *context,
                     const char **why)
{
    memset(out, 0, sizeof *out);
    if (n > KVQ__REPLY_MAX) {
        *why = "it is larger than 4 MiB";
        return KVQ_E_REMOTE;
    }
    struct reader *r = calloc(1, sizeof *r);
    XML_Parser parser = XML_ParserCreate(NULL);
    int rc = KVQ_E_NO_MEMORY;
    *why = "there is no memory to read it";
    if (!r || !parser)
        goto out;
    r->parser = parser;
    r->out = out;
    r->each = each;
    r->context = context;
    XML_SetUserData(parser, r);
    XML_SetElementHandler(parser, on_start, on_end);
    XML_SetCharacterDataHandler(parser, on_text);
    XML_SetStartDoctypeDeclHandler(parser, on_doctype);
    if (XML_Parse(parser, data, (int)n, 1) != XML_STATUS_OK && r->rc == 0) {
        r->rc = KVQ_E_REMOTE;
        r->why = n ? XML_ErrorString(XML_GetErrorCode(parser)) : "it is empty";
    }
    rc = r->rc;
    *why = r->why;
out:
    if (parser)
        XML_ParserFree(parser);
    free(r);
    return rc;
}

// Copies digits up to `end` and steps over it.
static bool take_number(const char **at, char end, uint64_t *out)
{
    char digits[21];
    size_t n = strspn(*at, "0123456789");
    if (n >= sizeof digits || (*at)[n] != end)
        return false;
    memcpy(digits, *at, n);
    digits[n] = '\0';
    *at += n + (end != '\0');
    return kvq__reply_number(digits, INT64_MAX, out);
}

bool kvq__reply_range(const char *value, uint64_t *from, uint64_t *last, uint64_t *all)
{
    static const char unit[] = "bytes ";
    if (strncmp(value, unit, sizeof unit - 1) != 0)
        return false;
    value += sizeof unit - 1;
    return take_number(&value, '-', from) && take_number(&value, '/', last) &&
           take_number(&value, '\0', all) && *from <= *last && *last < *all;
}

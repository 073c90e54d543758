// SPDX-License-Identifier: Apache-2.0
// Printing: messages as JSON by their own descriptors, and numbers in short forms for people.
#include <cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/json.h"
#include "tools/kvqctl/kvqctl.h"

enum { ELEMENT_BYTES = 4096 }; // that printing one begins with

// A ring of static buffers, so that one printf may use several short forms.
static char *short_buffer(size_t *size)
{
    static char buffers[16][512];
    static unsigned next;
    *size = sizeof buffers[0];
    return buffers[next++ % 16];
}

const char *kvq__ctl_text(const char *format, ...)
{
    size_t size;
    char *text = short_buffer(&size);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, size, format, arguments);
    va_end(arguments);
    return text;
}

bool kvq__ctl_flush(void)
{
    static bool said;
    int error = fflush(stdout) == 0 ? 0 : errno;
    if (error == 0 && !ferror(stdout))
        return true;
    // Why something failed within a printf is not known; one byte more fails for the same reason.
    if (error == 0 && write(STDOUT_FILENO, "\n", 1) < 0)
        error = errno;
    if (!said && error != EPIPE)
        fprintf(stderr, "kvqctl: cannot write%s\n",
                error ? kvq__ctl_text(": %s", strerror(error)) : " all of the output");
    said = true;
    return false;
}

const char *kvq__ctl_count(uint64_t n, const char *one)
{
    return kvq__ctl_text("%" PRIu64 " %s%s", n, one, n == 1 ? "" : "s");
}

const char *kvq__ctl_bytes(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0, size;
    char *text = short_buffer(&size);
    while (value >= 1024 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1024;
        unit++;
    }
    snprintf(text, size, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}

const char *kvq__ctl_of_bytes(uint64_t used, uint64_t limit)
{
    size_t size;
    char is[32], most[32];
    snprintf(is, sizeof is, "%s", kvq__ctl_bytes(used));
    snprintf(most, sizeof most, "%s", kvq__ctl_bytes(limit));
    char *text = short_buffer(&size);
    snprintf(text, size, limit ? "%s of %s" : "%s", is, most);
    return text;
}

const char *kvq__ctl_of(uint64_t used, uint64_t limit)
{
    size_t size;
    char *text = short_buffer(&size);
    if (limit)
        snprintf(text, size, "%llu of %llu", (unsigned long long)used, (unsigned long long)limit);
    else
        snprintf(text, size, "%llu", (unsigned long long)used);
    return text;
}

const char *kvq__ctl_duration(uint64_t ms)
{
    size_t size;
    char *text = short_buffer(&size);
    unsigned long long s = ms / 1000;
    if (s < 10)
        snprintf(text, size, "%.1f s", (double)ms / 1000);
    else if (s < 120)
        snprintf(text, size, "%llu s", s);
    else if (s < 7200)
        snprintf(text, size, "%llu min", s / 60);
    else if (s < 48 * 3600)
        snprintf(text, size, "%llu h %llu min", s / 3600, s / 60 % 60);
    else
        snprintf(text, size, "%llu days", s / 86400);
    return text;
}

// The bytes of the character at the text's front if a terminal would obey it, and not show it; else
// 0. They are ASCII's and U+0080 to U+009F, and those that let text stand in another order than it
// has: U+061C, U+200E, U+200F, U+202A to U+202E, U+2066 to U+2069.
static size_t control_bytes(const unsigned char *text)
{
    if (text[0] < 0x80)
        return text[0] < 32 || text[0] == 127;
    if (text[0] == 0xc2)
        return text[1] >= 0x80 && text[1] <= 0x9f ? 2 : 0;
    if (text[0] == 0xd8)
        return text[1] == 0x9c ? 2 : 0;
    if (text[0] != 0xe2 || (text[1] != 0x80 && text[1] != 0x81))
        return 0;
    unsigned char last = text[2];
    bool turns = text[1] == 0x80 ? last == 0x8e || last == 0x8f || (last >= 0xaa && last <= 0xae)
                                 : last >= 0xa6 && last <= 0xa9;
    return turns ? 3 : 0;
}

const char *kvq__ctl_clean(const char *text)
{
    size_t size, used = 0;
    char *clean = short_buffer(&size);
    while (text && *text && used + 1 < size) {
        size_t control = control_bytes((const unsigned char *)text);
        clean[used++] = control ? '?' : *text;
        text += control ? control : 1;
    }
    clean[used] = 0;
    return clean;
}

uint64_t kvq__ctl_counter(const Kvq__StatusReply *status, const char *name)
{
    for (size_t i = 0; i < status->n_counters; i++)
        if (strcmp(status->counters[i]->name, name) == 0)
            return status->counters[i]->value;
    return 0;
}

void kvq__ctl_print_and_free(struct cJSON *json)
{
    char *text = cJSON_Print(json);
    printf("%s\n", text ? text : "null");
    cJSON_free(text);
    cJSON_Delete(json);
}

void kvq__ctl_print_json(const ProtobufCMessage *message)
{
    kvq__ctl_print_and_free(kvq_json_of_message(message));
}

// As an element of an array: the brackets of one that holds nothing else are left out.
static void print_element(const ProtobufCMessage *message, bool formatted)
{
    cJSON *array = cJSON_CreateArray();
    cJSON_AddItemToArray(array, kvq_json_of_message(message));
    char *text = cJSON_PrintBuffered(array, ELEMENT_BYTES, formatted);
    size_t n = text ? strlen(text) : 0;
    if (n > 2)
        fwrite(text + 1, 1, n - 2, stdout);
    else
        fputs("null", stdout);
    cJSON_free(text);
    cJSON_Delete(array);
}

// One element after the other: a list may be long.
static void print_elements(ProtobufCMessage *const *messages, size_t n, bool formatted)
{
    putchar('[');
    for (size_t i = 0; i < n; i++) {
        if (i > 0)
            fputs(formatted ? ", " : ",", stdout);
        print_element(messages[i], formatted);
    }
    putchar(']');
}

void kvq__ctl_print_json_array(ProtobufCMessage *const *messages, size_t n)
{
    print_elements(messages, n, true);
    putchar('\n');
}

void kvq__ctl_print_json_message(const ProtobufCMessage *message)
{
    cJSON *json = kvq_json_of_message(message);
    char *text = cJSON_PrintUnformatted(json);
    printf("%s\n", text ? text : "null");
    cJSON_free(text);
    cJSON_Delete(json);
}

void kvq__ctl_print_json_line(const ProtobufCMessage *status, ProtobufCMessage *const *sessions,
                              size_t n)
{
    cJSON *json = kvq_json_of_message(status);
    char *text = cJSON_PrintUnformatted(json);
    printf("{\"status\":%s,\"sessions\":", text ? text : "null");
    print_elements(sessions, n, false);
    fputs("}\n", stdout);
    cJSON_free(text);
    cJSON_Delete(json);
}

void kvq__ctl_print_done(const struct kvq__ctl *ctl, const char *what, const char *name)
{
    if (!ctl->json) {
        printf("%s %s\n", what, kvq__ctl_clean(name));
        return;
    }
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, what, name);
    kvq__ctl_print_and_free(object);
}

void kvq__ctl_print_versions(const char *ours, const char *theirs)
{
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "kvqctl", ours);
    cJSON_AddItemToObject(object, "kvqd", theirs ? cJSON_CreateString(theirs) : cJSON_CreateNull());
    kvq__ctl_print_and_free(object);
}

// SPDX-License-Identifier: Apache-2.0
//
// The configuration file's lines: what is a comment, a section, a value, and how long they may be.
#include "daemon/config/change.h"
#include "daemon/config/config.h"
#include "proto/status.h"
#include "tests/kits/unit.h"

static struct kvq_config config;
static char text[KVQ_TEXT_BYTES];
static char *no_environment[] = {NULL};

static void parse(const char *contents)
{
    kvq__config_defaults(&config, no_environment);
    if (kvq__config_parse(&config, "f", "", contents, text))
        fail_msg("%s in\n%s", text, contents);
}

static void parse_refused(const char *contents, const char *words)
{
    kvq__config_defaults(&config, no_environment);
    assert_int_equal(kvq__config_parse(&config, "f", "", contents, text), KVQ_E_INVALID);
    assert_says(text, words);
}

// What shells and other programs take for a comment, or leave out.
PLAIN_TEST(test_part_of_a_value)
{
    const char *good = "log_file = /x/a#b ; comment\nremote_prefix = it's\ncodebook_dir = \"/x\n"
                       "[namespace a]\nshare_prefixes_with = b#c , *\n";
    parse(good);
    assert_string_equal(config.log_file, "/x/a#b");
    assert_string_equal(config.codebook_dir, "\"/x");
    assert_string_equal(config.namespaces[0].share_with[0], "b#c");
    assert_string_equal(config.namespaces[0].share_with[1], "*");
    parse_refused("\nstorage_dir = /x/store # the big disk\n",
                  "f:2: storage_dir is \"/x/store # the big disk\": a # behind a value would be "
                  "part of it; begin a comment there with a blank and ;");
    parse_refused("log_file = /x\t#c\n", "f:1: log_file is");
    parse_refused("log_file = # none\n", "f:1: log_file is \"# none\": a # behind");
    parse_refused("workers = 3 # of them\n", "f:1: workers is \"3 # of them\": a # behind");
    parse_refused("log_file = \"kvqd.log\"\n",
                  "f:1: log_file is \"kvqd.log\": the quotes would be part of it; leave them out");
    parse_refused("log_file = 'kvqd.log'\n", "f:1: log_file is 'kvqd.log': the quotes");
    parse_refused("[namespace a]\nshare_prefixes_with = \"b\"\n", "the quotes would be part");
}

PLAIN_TEST(test_where_sessions_are)
{
    parse("storage_dir =\n");
    parse("storage_dir = /x\n");
    assert_string_equal(config.storage_dir, "/x");
    parse_refused("\nstorage-dir = x/y\n", "f:2: storage_dir is \"x/y\", which depends on the");
}

#define UUID "GPU-01234567-89ab-cdef-0123-456789abcdef"

// A line may be as long as what an option takes; a comment may have any length.
PLAIN_TEST(test_long_lines)
{
    static char contents[16384];
    static const char gpus[] = UUID "," UUID "," UUID "," UUID "," UUID "," UUID "," UUID "," UUID;
    snprintf(contents, sizeof contents, "# %08000d\ngpus = %s\nlog_file = /%0254d ; %0200d\n", 0,
             gpus, 0, 0);
    parse(contents);
    assert_string_equal(config.gpus, gpus);
    assert_int_equal(strlen(config.log_file), 255);
    snprintf(contents, sizeof contents, "workers = 1\nlog_file = %0300d\n", 0);
    parse_refused(contents, "f:2: log_file is 300 bytes long; allowed is 255");
    snprintf(contents, sizeof contents, "workers = 1\n\n  log_file = %06000d\n", 0);
    parse_refused(contents, "f:3: a line is longer than 5000 bytes");
}

// Whatever comes before it, a section's name is not cut.
PLAIN_TEST(test_long_names)
{
    static const char *const before[] = {"", "\xef\xbb\xbf", "\f", " \t\r\v"};
    char contents[256];
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        snprintf(contents, sizeof contents, "%s[namespace %040d]\nuids = 1\n", before[i], 7);
        parse_refused(contents, "f:1: a section's name is longer than 47 bytes");
        snprintf(contents, sizeof contents, "%s[namespace %037d]\nuids = 1\n", before[i], 7);
        parse(contents);
        assert_int_equal(strlen(config.namespaces[0].name), 37);
    }
}

// What a header names is there, and known or refused, without a key as well.
PLAIN_TEST(test_sections_without_keys)
{
    parse("[kvqd]\n[namespace a]\n; uids = 1\n  [namespace b] ; c\n[key k]\n");
    assert_int_equal(config.n_namespaces, 2);
    assert_string_equal(config.namespaces[1].name, "b");
    assert_int_equal(config.namespaces[0].uids.n, 0);
    assert_int_equal(kvq__config_resolve(&config, text), KVQ_E_INVALID);
    assert_says(text, "[key k] has no public");
    parse_refused("\n[namespac a]\n", "f:2: section [namespac a] is not known; known are [kvqd]");
    parse_refused("[]\n", "f:1: section [] is not known");
    parse_refused("[namespace a/b]\n", "f:1: [namespace a/b]: a name is");
    parse_refused("\n [format f]\n", "f:2: [format f]: it says neither `base` nor");
    parse_refused("[key a b]\n", "f:1: [key a b]: a name is");
    parse_refused("[namespace a] uids = 5\n", "f:1: text stands behind the ]");
}

// What inih takes, and a comment behind a value that goes on.
PLAIN_TEST(test_lines)
{
    parse("\xef\xbb\xbfworkers: 2\r\n\r\nlog_file =;x;y\t; z\r\n[namespace a] ; x\nuids=1");
    assert_int_equal(config.workers, 2);
    assert_string_equal(config.log_file, ";x;y");
    assert_int_equal(config.namespaces[0].uids.n, 1);
    parse("[format f]\nbase = oscar2\nlayers = 0:k8v4 ; one\n  1:int8 ; two\n\n\t2:int8\n");
    assert_int_equal(config.own_formats[0].n_ranges, 3);
    parse_refused("workers = 1\n  spin_us = 2\n", "f:2: workers is set twice (or continued");
    parse_refused("[a ; b]\n", "f:1: neither `name = value` nor a [section]");
    parse_refused("workers\n", "f:1: neither `name = value` nor a [section]");
    parse_refused("=1\n", "f:1:  is not known");
}

int main(void)
{
    return run_all(NULL, NULL);
}

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
    const char *good = "log_file = /x/a#b ; comment\nremote_prefix = it's\nstorage_dir = \"/x\n"
                       "[namespace a]\nshare_prefixes_with = b#c , *\n";
    parse(good);
    assert_string_equal(config.log_file, "/x/a#b");
    assert_string_equal(config.storage_dir, "\"/x");
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

int main(void)
{
    return run_all(NULL, NULL);
}

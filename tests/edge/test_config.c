// SPDX-License-Identifier: Apache-2.0
//
// The configuration: precedence, values, namespaces, and what every mistake is answered with.
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/config/change.h"
#include "daemon/config/config.h"
#include "proto/status.h"
#include "storage/remote.h"
#include "tests/kits/folder.h"
#include "tests/kits/unit.h"

static struct kvq_config config;
static char text[KVQ_TEXT_BYTES];
static char *no_environment[] = {NULL};

static int load(char **arguments, char **environment)
{
    int argc = 0;
    while (arguments[argc])
        argc++;
    return kvq__config_load(&config, argc, arguments, environment, text);
}

// A file of that contents; returns its path, which the caller unlinks.
static char *file_of(const char *contents)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/kvq-test-config-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, contents, strlen(contents)), strlen(contents));
    close(fd);
    return path;
}

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

static void flags_refused(const char *flag, const char *value, const char *words)
{
    char *arguments[] = {"kvqd", (char *)flag, (char *)value, NULL};
    assert_int_equal(load(arguments, no_environment), KVQ_E_INVALID);
    assert_says(text, words);
}

PLAIN_TEST(test_usual_extent)
{
    const uint64_t gib = 1 << 30;
    assert_true(kvq__usual_extent(64 << 20) == 8 << 20);
    assert_true(kvq__usual_extent(8 * gib) == 8 << 20);
    assert_true(kvq__usual_extent(9 * gib) == 16 << 20);
    assert_true(kvq__usual_extent(64 * gib) == 64 << 20);
    assert_true(kvq__usual_extent(4096 * gib) == 64 << 20);
    char *given[] = {"kvqd", "--extent-bytes", "4mb", NULL};
    assert_int_equal(load(given, no_environment), 0);
    assert_true(config.host_extent_bytes == 4 << 20 && config.gpu_extent_bytes == 4 << 20);
    char *small[] = {"kvqd", "--pool-bytes", "32mb", NULL}; // which holds none of 64 MiB
    assert_int_equal(load(small, no_environment), 0);
    assert_true(config.host_extent_bytes == 8 << 20 && config.gpu_extent_bytes == 8 << 20);
}

PLAIN_TEST(test_precedence)
{
    char *path = file_of("pool_bytes = 128mb\nspin_us = 7\nkeep_seconds = 5\n");
    char variable[128];
    snprintf(variable, sizeof variable, "KVQD_CONFIG=%s", path);
    char *environment[] = {variable, "KVQD_SPIN_US=8", "KVQD_KEEP_SECONDS=6", "OTHER=1", NULL};
    char *arguments[] = {"kvqd", "--keep-seconds=9", NULL};
    assert_int_equal(load(arguments, environment), 0);
    assert_int_equal(config.pool_bytes, 128 << 20);      // file
    assert_int_equal(config.spin_us, 8);                 // environment over file
    assert_int_equal(config.keep_seconds, 9);            // flag over both
    assert_int_equal(config.host_extent_bytes, 8 << 20); // default, of so small a pool
    assert_int_equal(config.gpu_extent_bytes, 64 << 20);
    unlink(path);
    char *missing[] = {"kvqd", "--config", "/nonexistent/kvqd.conf", NULL};
    assert_int_equal(load(missing, no_environment), KVQ_E_INVALID);
    assert_says(text, "/nonexistent/kvqd.conf: cannot read it");
}

// A pipe would be read once, in part; it is refused, with and without somebody who writes.
PLAIN_TEST(test_no_regular_file)
{
    char folder[] = "/tmp/kvq-test-config-XXXXXX", fifo[64], of_pipe[32];
    int ends[2];
    assert_non_null(mkdtemp(folder));
    snprintf(fifo, sizeof fifo, "%s/kvqd.conf", folder);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], "spin_us = 7\n", 12), 12);
    snprintf(of_pipe, sizeof of_pipe, "/dev/fd/%d", ends[0]);
    const char *const paths[] = {fifo, of_pipe, folder};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        flags_refused("--config", paths[i], "is no regular file");
    close(ends[0]);
    close(ends[1]);
    unlink(fifo);
    rmdir(folder);
    char *nothing[] = {"kvqd", "--config", "/dev/null", NULL};
    assert_int_equal(load(nothing, no_environment), 0);
}

PLAIN_TEST(test_values)
{
    static const struct {
        const char *value;
        uint64_t bytes;
    } sizes[] = {{"67108864", 64ull << 20}, {"64mb", 64ull << 20},     {"64 MB", 64ull << 20},
                 {"65536k", 64ull << 20},   {"65536KiB", 64ull << 20}, {"30gb", 30ull << 30},
                 {"1t", 1ull << 40},        {"67108864b", 64ull << 20}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *arguments[] = {"kvqd", "--client_bytes", (char *)sizes[i].value, NULL};
        assert_int_equal(load(arguments, no_environment), 0);
        assert_true(config.client_bytes == sizes[i].bytes);
    }
    char *many[] = {"kvqd",  "--pin",        "yes",           "--runtime-mode",
                    "0711",  "--admin-uids", "5,6 , 7",       "--log-level",
                    "debug", "--attention",  "fast",          "--ready-fd",
                    "4",     "-n",           "--lifetime-fd", "5",
                    NULL};
    assert_int_equal(load(many, no_environment), 0);
    assert_true(config.pin);
    assert_int_equal(config.runtime_mode, 0711);
    assert_int_equal(config.admin_uids.n, 3);
    assert_int_equal(config.admin_uids.id[2], 7);
    assert_int_equal(config.log_level, 3);
    assert_int_equal(config.fast, 1);
    assert_int_equal(config.ready_fd, 4);
    assert_int_equal(config.lifetime_fd, 5);
    assert_int_equal(config.workers, kvq__usual_workers(kvq__usable_cpus()));
    assert_true(kvq__usual_workers(1) == 1 && kvq__usual_workers(7) == 7);
    assert_true(kvq__usual_workers(8) == 7 && kvq__usual_workers(64) == 63);
    assert_true(config.pool_bytes >= config.host_extent_bytes);
    assert_true(config.pool_bytes % config.host_extent_bytes == 0);
    assert_true(kvq__usual_extent(config.pool_bytes) == config.host_extent_bytes);
    assert_true(config.client_bytes == 4ull << 30);
    char *small[] = {"kvqd", "--buffer-bytes", "3mb", NULL};
    assert_int_equal(load(small, no_environment), 0);
    assert_int_equal(config.buffer_bytes, 3 << 20);
}

// What one client is allowed widens it, if somebody said so, up to the memory.
PLAIN_TEST(test_usual_buffer_bytes)
{
    const uint64_t gib = 1 << 30;
    char *usual[] = {"kvqd", NULL};
    char *large[] = {"kvqd", "--client-bytes", "3gb", NULL};
    assert_int_equal(load(usual, no_environment), 0);
    assert_true(kvq__usual_buffer_bytes(&config, 2 * gib) == gib); // client_bytes is 4gb
    assert_int_equal(load(large, no_environment), 0);
    assert_true(kvq__usual_buffer_bytes(&config, 8 * gib) == 4 * gib);
    assert_true(kvq__usual_buffer_bytes(&config, 4 * gib) == 3 * gib);
    assert_true(kvq__usual_buffer_bytes(&config, 2 * gib) == 2 * gib);
    large[2] = "1tb";
    assert_int_equal(load(large, no_environment), 0);
    assert_true(config.buffer_bytes <= 1ull << 40);
}

PLAIN_TEST(test_runtime_dir)
{
    char *with[] = {"XDG_RUNTIME_DIR=/run/user/5", NULL};
    char *arguments[] = {"kvqd", NULL};
    assert_int_equal(load(arguments, with), 0);
    assert_string_equal(config.runtime_dir, "/run/user/5/kvqd");
    assert_int_equal(load(arguments, no_environment), 0);
    assert_string_equal(config.runtime_dir, "/run/kvqd");
    flags_refused("--runtime-dir", "here", "not an absolute path");
    flags_refused("--runtime-mode", "0720", "runtime_mode = 0720 lets others write to");
    flags_refused("--runtime-mode", "0752", "take write from group and others (0750, 0755)");
    char *group[] = {"kvqd", "--runtime-group", "root", NULL};
    assert_int_equal(load(group, no_environment), 0);
    assert_int_equal(kvq__config_check_files(&config, text), 0);
    group[2] = "no-such-group"; // a start may be early
    assert_int_equal(load(group, no_environment), 0);
    assert_int_equal(kvq__config_check_files(&config, text), KVQ_E_INVALID);
    assert_non_null(strstr(text, "runtime_group: \"no-such-group\" is no group of this system"));
    flags_refused(
        "--runtime-dir",
        "/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "bytes long; allowed is 80");
}

PLAIN_TEST(test_wrong_values)
{
    flags_refused("--pool-bytes", "64q", "pool_bytes is \"64q\"; a size is");
    flags_refused("--pool-bytes", "-1", "a size is");
    flags_refused("--pool-bytes", "", "a size is");
    flags_refused("--pool-bytes", "1.5gb", "a size is");
    flags_refused("--pool-bytes", "99999999999999999999", "a size is");
    flags_refused("--pool-bytes", "999999999tb", "more than any machine has");
    flags_refused("--pool-bytes", "100tb", "allowed is 0 to 64tb");
    flags_refused("--pool-bytes", "1mb", "less than one extent");
    flags_refused("--extent-bytes", "3mb", "not a multiple of 2mb");
    flags_refused("--workers", "many", "give a whole number");
    flags_refused("--workers", "257", "allowed is 0 to 256");
    flags_refused("--workers", "1kb", "give a whole number");
    flags_refused("--pin", "maybe", "allowed is no, yes");
    flags_refused("--log-level", "loud", "allowed is error, warn, info, debug");
    flags_refused("--runtime-mode", "0999", "whole octal number");
    flags_refused("--runtime-mode", "1777", "allowed is 0000 to 0777");
    flags_refused("--admin-uids", "root", "give numbers");
    flags_refused("--admin-uids", "4294967295", "below 4294967295");
    flags_refused("--log-file", "a\nb", "control character");
    flags_refused("--ready-fd", "x", "not the number of a descriptor");
    flags_refused("--lifetime-fd", "-1", "not the number of a descriptor");
    flags_refused("--max-clients", "0", "allowed is 1 to 1024");
}

static void remote_refused(const char *const *flags, const char *words)
{
    char *arguments[] = {"kvqd",           "--runtime-dir=/r", (char *)flags[0],
                         (char *)flags[1], (char *)flags[2],   NULL};
    assert_int_equal(load(arguments, no_environment), KVQ_E_INVALID);
    assert_says(text, words);
}

PLAIN_TEST(test_remote)
{
    char *good[] = {"kvqd",
                    "--runtime-dir=/r",
                    "--remote-endpoint=https://host:1",
                    "--remote-bucket=bucket",
                    "--storage-dir=/s",
                    NULL};
    assert_int_equal(load(good, no_environment), kvq_remote_built() ? 0 : KVQ_E_INVALID);
    if (kvq_remote_built())
        remote_refused((const char *[3]){"--remote-endpoint=http://h", "--remote-bucket=B",
                                         "--storage-dir=/s"},
                       "remote store: bucket \"B\" has not 3 to 63");
    else
        assert_says(text, "this build knows no remote store");
    remote_refused((const char *[3]){"--remote-bucket=b"}, "remote_bucket: is set, but");
    remote_refused((const char *[3]){"--remote-keys-file=k"}, "remote_keys_file: is set, but");
    remote_refused((const char *[3]){"--remote-endpoint=http://h", "--storage-dir=/s"},
                   "remote_bucket: is empty");
    remote_refused((const char *[3]){"--remote-endpoint=http://h", "--remote-bucket=bucket"},
                   "storage_dir: is empty");
    remote_refused((const char *[3]){"--remote-endpoint=http://me:hidden@h",
                                     "--remote-bucket=bucket", "--storage-dir=/s"},
                   "holds a user's name");
    assert_null(strstr(text, "hidden"));
    flags_refused("--remote-part-bytes", "1kb", "allowed is 64kb to 256mb");
    flags_refused("--remote-stall-seconds", "0", "allowed is 1 to 3600");
}

PLAIN_TEST(test_unknown_names)
{
    flags_refused("--pool-byte", "1", "the nearest is --pool-bytes");
    flags_refused("--worker", "1", "the nearest is --workers");
    flags_refused("--bogus", "1", "not known; see kvqd --help");
    flags_refused("-x", "1", "-x: not known");
    flags_refused("stray", NULL, "stray: not known");
    flags_refused("--pool-bytes", NULL, "needs a value");
    flags_refused("--help=yes", NULL, "takes no value");
    char *arguments[] = {"kvqd", NULL};
    char *environment[] = {"KVQD_SPIN_USEC=1", NULL};
    assert_int_equal(load(arguments, environment), KVQ_E_INVALID);
    assert_says(text, "KVQD_SPIN_USEC: this variable is not known; the nearest is "
                      "KVQD_SPIN_US");
}

PLAIN_TEST(test_file)
{
    const char *good = "# a comment\n; another\npool-bytes = 1gb\n\n[kvqd]\nworkers = 3\n"
                       "[namespace team-a]\nuids = 1000, 1001\ngids=2000\nhost_bytes = 10gb ; ok\n"
                       "[namespace b]\nmax_sessions = 4\n[namespace team-a]\nmax_sessions = 9\n"
                       "[namespace c]\ntable_bytes = 5mb\n";
    parse(good);
    assert_int_equal(config.workers, 3);
    assert_int_equal(config.n_namespaces, 3);
    assert_string_equal(config.namespaces[0].name, "team-a");
    assert_int_equal(config.namespaces[0].uids.id[1], 1001);
    assert_int_equal(config.namespaces[0].gids.n, 1);
    assert_true(config.namespaces[0].host_bytes == 10ull << 30);
    assert_int_equal(config.namespaces[0].max_sessions, 9);
    assert_int_equal(config.namespaces[1].max_sessions, 4);
    assert_int_equal(kvq__config_sessions(&config, &config.namespaces[1]), 4);
    assert_int_equal(kvq__config_sessions(&config, &config.namespaces[2]), 65536);
    assert_int_equal(config.namespaces[2].table_bytes, 5 << 20);
}

PLAIN_TEST(test_wrong_files)
{
    parse_refused("\n\npool_bites = 1gb\n", "f:3: pool_bites is not known; the nearest is "
                                            "pool_bytes");
    parse_refused("workers = 1\nworkers = 2\n", "f:2: workers is set twice");
    parse_refused("workers = 1\n  2\n", "f:2: workers is set twice");
    parse_refused("workers = x\n", "f:1: workers is \"x\"");
    parse_refused("workers\n", "f:1: neither");
    parse_refused("[kvqd\n", "f:1: neither");
    parse_refused("[other]\nx = 1\n", "f:1: section [other] is not known");
    parse_refused("[namespace a]\npool_bytes = 1\n", "f:2: pool_bytes is not known in "
                                                     "[namespace a]");
    parse_refused("[namespace a b]\nuids = 1\n", "without blanks");
    parse_refused("[namespace a/b]\nuids = 1\n", "without blanks");
    parse_refused("[namespace #1]\nuids = 1\n", "without blanks");
    parse_refused("[namespace a]\nuids = 1\nuids = 2\n", "f:3: uids is set twice");
    parse_refused("[namespace a]\nuids = me\n", "f:2: uids is \"me\"; give numbers");
    parse_refused("[namespace a]\nmax_sessions = 1tb\n", "allowed is 0 to 4294967295");
    parse_refused("[namespace aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa]\nuids=1\n",
                  "f:1: a section's name is longer");
    parse_refused("[namespace a]\nshare_prefixes_with = b c\n",
                  "f:2: share_prefixes_with has \"b c\", which cannot be a namespace's name");
    parse_refused("[namespace a]\nshare_prefixes_with = b, c/d\n", "has \"c/d\", which cannot");
    parse_refused("[key a]\npublic = 00\n", "f:2: public is \"00\"; it has to be the 64");
    parse_refused("[key a]\nrole = king\n", "f:2: role is \"king\"; allowed is read, operate");
    parse_refused("[key a]\nrole = none\n", "f:2: role is \"none\"; allowed is read, operate");
    parse_refused("[key a]\nrole = read\nrole = admin\n", "f:3: role is set twice");
    parse_refused("[key a]\nuid = 1\n", "f:2: uid is not known in [key a]");
    parse_refused("[key a b]\nrole = read\n", "without blanks");
}

#define HEX_0 "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
#define HEX_1 "10112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

// Sections [key NAME], and the roles that options give.
PLAIN_TEST(test_roles)
{
    const uint32_t groups[] = {7, 8};
    const char *good = "read_uids = 1, 2\noperate_gids = 8\nadmin_uids = 2\n"
                       "[key alice]\npublic = " HEX_0 "\n[key bob]\nrole = ADMIN\n"
                       "public = " HEX_1 "\n";
    parse(good);
    assert_int_equal(kvq__config_resolve(&config, text), 0);
    assert_int_equal(config.n_keys, 2);
    assert_int_equal(config.keys[0].role, KVQ__ROLE_READ); // the least
    assert_int_equal(config.keys[1].role, KVQ__ROLE_ADMIN);
    assert_string_equal(kvq__config_key_of(&config, config.keys[1].public_key)->name, "bob");
    assert_null(kvq__config_key_of(&config, (const uint8_t *)HEX_0));
    assert_null(kvq__config_key_find(&config, ""));
    assert_int_equal(kvq__config_role(&config, 1, NULL, 0), KVQ__ROLE_READ);
    assert_int_equal(kvq__config_role(&config, 1, groups, 2), KVQ__ROLE_OPERATE); // the highest
    assert_int_equal(kvq__config_role(&config, 2, groups, 2), KVQ__ROLE_ADMIN);
    assert_int_equal(kvq__config_role(&config, 3, groups, 1), KVQ__ROLE_NONE);

    // Of all files together.
    config.keys[1] = config.keys[0];
    memcpy(config.keys[1].name, "bob", 4);
    assert_int_equal(kvq__config_resolve(&config, text), KVQ_E_INVALID);
    assert_says(text, "[key alice] and [key bob] have the same public");
    parse("[key a]\nrole = read\n");
    assert_int_equal(kvq__config_resolve(&config, text), KVQ_E_INVALID);
    assert_says(text, "[key a] has no public");
}

PLAIN_TEST(test_too_many_keys)
{
    char contents[(KVQ_MAX_KEYS + 1) * 32];
    size_t used = 0;
    for (int i = 0; i <= KVQ_MAX_KEYS; i++)
        used += (size_t)snprintf(contents + used, 32, "[key n%d]\nrole = read\n", i);
    parse_refused(contents, "more than 64 keys");
}

PLAIN_TEST(test_too_many_namespaces)
{
    char *contents = calloc(KVQ_MAX_NAMESPACES + 1, 40);
    size_t used = 0;
    for (int i = 0; i <= KVQ_MAX_NAMESPACES; i++)
        used += (size_t)snprintf(contents + used, 40, "[namespace n%d]\nuids = 1\n", i);
    parse_refused(contents, "more than 128 namespaces");
    free(contents);
}

// ---- Formats ----

static const char mixes[] = "[format first]\nbase = oscar4\nsink = 32\nk_bits = 3\n"
                            "[format mymix]\nk = oscar2-g64 ; K\nv = innerq-hybrid\n"
                            "recent=40\ntoken_scale = mean\nlayers = 0-1:k8v4, 7:first\n"
                            "layers = 2-3 : oscar2\n"
                            "[format booked]\nk = vecinfer-2@mine\nv = kivi4\n"
                            "[format all]\nlayers = 0:booked, 1-255:vecinfer-k<4,10>v<8,12>@b,\n";

static void check_mixes(void)
{
    const struct kvq__own_format *first = &config.own_formats[0], *mix = &config.own_formats[1];
    assert_int_equal(config.n_formats, 4);
    assert_string_equal(first->name, "first");
    assert_int_equal(first->rest.k.bits, 3);
    assert_int_equal(first->rest.v.bits, 4);
    assert_int_equal(first->rest.sink_tokens, 32);
    assert_string_equal(mix->rest.name, "mymix");
    assert_int_equal(mix->rest.k.group, 64);
    assert_int_equal(mix->rest.v.codec, KVQ_CODEC_HYBRID);
    assert_int_equal(mix->rest.recent_tokens, 40); // not the 96 of innerq-hybrid
    assert_int_equal(mix->rest.k_token_scale, KVQ_SCALE_MEAN_ABS);
    assert_string_equal(mix->rest.source, "oscar2-g64+innerq-hybrid:recent=40:token_scale=mean");
    assert_int_equal(mix->n_ranges, 3);
    assert_string_equal(mix->ranges[0].row.name, "k8v4");
    assert_int_equal(mix->ranges[0].last, 1);
    assert_string_equal(mix->ranges[1].row.name, "first");
    assert_int_equal(mix->ranges[1].row.k.bits, 3);
    assert_int_equal(mix->ranges[2].first, 2);
    assert_string_equal(config.own_formats[2].rest.name, "booked@mine");
    assert_false(config.own_formats[3].has_rest);
    assert_string_equal(config.own_formats[3].ranges[0].row.name, "booked@mine");
    assert_string_equal(config.own_formats[3].ranges[1].row.name, "vecinfer-k<4,10>v<8,12>@b");
}

PLAIN_TEST(test_formats)
{
    static char printed[1 << 16];
    parse(mixes);
    check_mixes();
    // What is printed means the same.
    kvq__config_print(&config, printed, sizeof printed);
    parse(printed);
    check_mixes();
}

PLAIN_TEST(test_wrong_formats)
{
    static const struct {
        const char *contents, *says;
    } cases[] = {
        {"[format oscar2]\nbase = kivi2\n", "f:1: [format oscar2]: the name is a built-in"},
        {"[format oscar2-g64]\nbase = kivi2\n", "f:1: [format oscar2-g64]: the name is a built"},
        {"[format oscar2-tuned]\nbase = kivi2\n", "as in my-oscar2-tuned"},
        {"[format vecinfer-k4x8v4x8]\nbase = kivi2\n", "is a built-in format's"},
        {"[format a+b]\nbase = kivi2\n", "a name is 1 to 40 letters"},
        {"[format a:b]\nbase = kivi2\n", "a name is 1 to 40 letters"},
        {"[format a@b]\nbase = kivi2\n", "a name is 1 to 40 letters"},
        {"[format -a]\nbase = kivi2\n", "begins with a letter or digit"},
        {"[format ]\nbase = kivi2\n", "a name is 1 to 40 letters"},
        {"[format a]\nbase = oscar9\n", "format oscar9 is unknown; did you mean 'oscar2'?"},
        {"[format a]\nbase = oscar2-o3\n", "f:2: base: format oscar2-o3: suffix -o3 does not"},
        {"[format a]\nbase = oscar2\nbase = oscar2\n", "f:3: base is set twice"},
        {"[format a]\nbase = oscar2@book\n", "f:2: base: format oscar2 has no use for a codeb"},
        {"[format a]\nbase = oscar2\nsink = 97\n", "f:3: stage sink cannot be \"97\"; it can be 0"},
        {"[format a]\nbase = oscar2\nrot = odd\n", "it can be none, hadamard, signed"},
        {"[format a]\nbase = oscar2\nrot = none:sink=32\n", "holds no ':'"},
        {"[format a]\nbase = oscar2\nk_rotation = none\nrot = none\n", "f:4: rot is set twice"},
        {"[format a]\ncolour = red\n", "f:2: colour is not known in [format a]; known are base"},
        {"[format a]\ncolour = red\n", "there are k_channel, token_scale, k_rotation"},
        {"\n[format a]\nsink = 32\n", "f:2: [format a]: it says neither `base` nor"},
        {"\n\n[format a]\nk = oscar2\n", "f:3: [format a]: it has `k` alone; give `v`"},
        {"[format a]\nk = f16\nv = bf16\n", "f:1: [format a]: K and V have one 16-bit type"},
        {"[format a]\nk = f16\nv = kivi2\n", "f:1: [format a]: format a: K and V are both raw"},
        {"[format a]\nbase = f16\nsink = 32\n", "f:1: [format a]: format a is raw"},
        {"[format a]\nbase = kivi2\nunit = 33\n", "f:1: [format a]: format a: units have 32,"},
        {"[format a]\nk=vecinfer-2@x\nv=vecinfer-2@y\n", "one codebook, not x and y"},
        {"[format a]\nlayers =\n", "f:2: layers is empty"},
        {"[format a]\nlayers = oscar2\n", "f:2: layers: \"oscar2\" is not LAYER:FORMAT"},
        {"[format a]\nlayers = 0-:oscar2\n", "is not LAYER:FORMAT"},
        {"[format a]\nlayers = 3-1:oscar2\n", "f:2: layers 3-1: layers are numbered from 0 to 255"},
        {"[format a]\nlayers = 256:oscar2\n", "layers are numbered from 0 to 255"},
        {"[format a]\nlayers = 99999999999999999999:oscar2\n", "are numbered from 0 to 255"},
        {"[format a]\nlayers = 0-3:k8v4, 3:oscar2\n", "f:2: layers 3-3: they overlap with 0-3"},
        {"[format a]\nlayers = 3-5:k8v4, 0-3:oscar2\n", "f:2: layers 0-3: they overlap with 3-5"},
        {"[format a]\nlayers = 0:later\n[format later]\nbase=kivi2\n",
         "f:2: layers: format later "},
        {"[format a]\nlayers = 0:k8v4\n[format b]\nlayers = 0:a\n",
         "f:3: [format b]: layers: a differs from layer to layer itself"},
        {"[format a]\nlayers = 0:a\n", "a differs from layer to layer itself"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        parse_refused(cases[i].contents, cases[i].says);
}

PLAIN_TEST(test_too_many_formats)
{
    char *contents = calloc(300, 40);
    size_t used = 0;
    for (int i = 0; i <= KVQ_MAX_OWN_FORMATS; i++)
        used += (size_t)snprintf(contents + used, 40, "[format n%d]\nbase = kivi2\n", i);
    parse_refused(contents, "f:65: more than 32 formats");
    used = (size_t)snprintf(contents, 40, "[format a]\n");
    for (int i = 0; i <= KVQ_MAX_FORMAT_RANGES; i++)
        used += (size_t)snprintf(contents + used, 40, "layers = %d:kivi2\n", i);
    parse_refused(contents, "f:34: layers: more than 32 ranges");
    used = (size_t)snprintf(contents, 40, "[format aaaaaaaaaaaaaaaaaaaaaaaaaaaaa]\n");
    snprintf(contents + used, 200, "base = vecinfer-2@%045d\n", 0);
    parse_refused(contents, "is longer than 63 characters");
    free(contents);
}

PLAIN_TEST(test_texts_for_people)
{
    static char help[65536], printed[65536];
    char *arguments[] = {"kvqd", "--pool-bytes", "96mb", "--admin-uids", "3,4", NULL};
    assert_int_equal(load(arguments, no_environment), 0);
    memcpy(config.namespaces[0].name, "n", 2);
    config.namespaces[0].host_bytes = 3 << 20;
    config.n_namespaces = 1;
    kvq__config_help(help, sizeof help);
    assert_says(help, "--pool-bytes SIZE");
    assert_says(help, "(default 16mb; restart)");
    assert_says(help, "127.0.0.1:9647; restart)"); // a text's
    for (const char *line = help; *line; line += strcspn(line, "\n") + 1)
        assert_true(strcspn(line, "\n") <= 80);
    // What is printed is a file that means the same.
    struct kvq_config before = config;
    kvq__config_print(&config, printed, sizeof printed);
    parse(printed);
    assert_true(config.pool_bytes == before.pool_bytes);
    assert_int_equal(config.admin_uids.n, 2);
    assert_int_equal(config.namespaces[0].host_bytes, 3 << 20);
    kvq__config_help(help, 64); // cut, not overrun
    assert_true(strlen(help) < 64);
}

// ---- Changes while the daemon runs ----

static char told[8192];

static void note_told(void *context, const struct kvq__config_change *change)
{
    size_t used = strlen(told);
    snprintf(told + used, sizeof told - used, "%s: %s -> %s (%s)\n", change->name, change->before,
             change->after, change->live ? "live" : "restart");
}

PLAIN_TEST(test_every_option_says_when)
{
    static char help[65536];
    static struct kvq__option_text option;
    uint32_t n = 0, live = 0;
    kvq__config_defaults(&config, no_environment);
    kvq__config_help(help, sizeof help);
    for (; kvq__config_option(&config, n, &option); n++) {
        live += option.live;
        assert_string_equal(option.source, "default");
        assert_int_equal(kvq__config_find(option.name, text), (int)n);
    }
    uint32_t shown = 0, shown_live = 0;
    for (const char *at = help; (at = strpbrk(at, "(;")); at++) {
        const char *word = at + 1 + (*at == ';');
        shown_live += strncmp(word, "live)", 5) == 0;
        shown += strncmp(word, "live)", 5) == 0 || strncmp(word, "restart)", 8) == 0;
    }
    assert_in_range(live, 15, n - 15);
    assert_true(shown_live > 0 && shown >= shown_live && shown <= n);
    assert_int_equal(kvq__config_find("pool_byte", text), KVQ_E_INVALID);
    assert_says(text, "the nearest is pool_bytes");
    assert_int_equal(kvq__config_find("drain", text), KVQ_E_INVALID);
    assert_says(text, "the nearest is drain_ms"); // which begins so, though pin is nearer
    assert_int_equal(kvq__config_find("bogus", text), KVQ_E_INVALID);
    assert_says(text, "bogus is not known; kvqctl config get lists all options");
}

PLAIN_TEST(test_compare)
{
    static struct kvq_config next;
    kvq__config_defaults(&config, no_environment);
    assert_int_equal(kvq__config_parse(&config, "a", "",
                                       "workers = 2\nadmin_uids = 3\n[namespace a]\nuids = 1\n"
                                       "[namespace b]\nhost_bytes = 5mb\n[format m]\nk = int8\n"
                                       "v = int8\n[format g]\nbase = int8\n[key x]\nrole = read\n"
                                       "[key y]\nrole = read\n",
                                       text),
                     0);
    kvq__config_defaults(&next, no_environment);
    assert_int_equal(kvq__config_parse(&next, "b", "",
                                       "workers = 3\nadmin_uids = 3, 4\nlog_level = debug\n"
                                       "[namespace b]\nhost_bytes = 6mb\ngids = 9\n"
                                       "[namespace c]\nuids = 1\n[format m]\nbase = oscar2\n"
                                       "[key z]\nrole = read\n[key x]\nrole = admin\n",
                                       text),
                     0);
    told[0] = 0;
    kvq__config_compare(&config, &next, note_told, NULL);
    assert_string_equal(told, "workers: 2 -> 3 (restart)\n"
                              "admin_uids: 3 -> 3, 4 (live)\n"
                              "log_level: info -> debug (live)\n"
                              "[namespace b] gids:  -> 9 (live)\n"
                              "[namespace b] host_bytes: 5mb -> 6mb (live)\n"
                              "[namespace c]: not there -> there (live)\n"
                              "[namespace a]: there -> not there (restart)\n"
                              "[format m]: there -> another (restart)\n"
                              "[format g]: there -> not there (restart)\n"
                              "[key z]: not there -> there (live)\n"
                              "[key x] role: read -> admin (live)\n"
                              "[key y]: there -> not there (live)\n");
    assert_int_equal(kvq__config_merge(&next, &config, text), 0);
    kvq__config_adopt(&config, &next);
    assert_true(config.workers == 2 && config.admin_uids.n == 2 && config.log_level == 3);
    assert_true(config.n_namespaces == 3 && config.n_formats == 2);
    assert_string_equal(config.namespaces[2].name, "a"); // until a restart
    told[0] = 0;
    kvq__config_compare(&config, &next, note_told, NULL);
    assert_string_equal(told, "[format m]: there -> another (restart)\n"
                              "[format g]: there -> not there (restart)\n");
}

PLAIN_TEST(test_too_many_together)
{
    static struct kvq_config next;
    kvq__config_defaults(&config, no_environment);
    kvq__config_defaults(&next, no_environment);
    config.n_namespaces = 1;
    snprintf(config.namespaces[0].name, sizeof config.namespaces[0].name, "old");
    next.n_namespaces = KVQ_MAX_NAMESPACES;
    for (unsigned i = 0; i < KVQ_MAX_NAMESPACES; i++)
        snprintf(next.namespaces[i].name, sizeof next.namespaces[i].name, "n%u", i);
    assert_int_equal(kvq__config_merge(&next, &config, text), KVQ_E_INVALID);
    assert_says(text, "restart kvqd");
    next.n_namespaces--;
    assert_int_equal(kvq__config_merge(&next, &config, text), 0);
}

PLAIN_TEST(test_set_one)
{
    kvq__config_defaults(&config, no_environment);
    assert_int_equal(kvq__config_set(&config, "drain_ms", "77", text), 0);
    assert_int_equal(config.drain_ms, 77);
    static const char *const wrong[][3] = {
        {"drain_ms", "-1", "drain_ms is \"-1\""},
        {"drain_ms", "600001", "allowed is 0 to 600000"},
        {"workers", "1", "takes effect only when kvqd starts"},
        {"drian_ms", "1", "the nearest is drain_ms"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(kvq__config_set(&config, wrong[i][0], wrong[i][1], text), KVQ_E_INVALID);
        assert_says(text, wrong[i][2]);
    }
    assert_int_equal(config.drain_ms, 77);
}

// ---- conf.d ----

static char folder[64]; // with kvqd.conf and conf.d

static const char *path_of(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void put_file(const char *name, const char *contents)
{
    FILE *file = fopen(path_of(name), "w");
    assert_non_null(file);
    assert_true(fputs(contents, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int load_folder(void)
{
    char *arguments[] = {"kvqd", "--config", (char *)path_of("kvqd.conf"), NULL};
    return load(arguments, no_environment);
}

static void folder_refused(const char *words)
{
    assert_int_equal(load_folder(), KVQ_E_INVALID);
    assert_says(text, words);
}

static const char *source_of(const char *name)
{
    static struct kvq__option_text option;
    int number = kvq__config_find(name, text);
    assert_true(number >= 0 && kvq__config_option(&config, (uint32_t)number, &option));
    return option.source;
}

static int make_folder(void **state)
{
    snprintf(folder, sizeof folder, "/tmp/kvq-test-config-XXXXXX");
    assert_non_null(mkdtemp(folder));
    put_file("kvqd.conf", "spin_us = 1\ndrain_ms = 1\nkeep_seconds = 1\n");
    return mkdir(path_of("conf.d"), 0755);
}

static int drop_folder(void **state)
{
    return remove_folder(folder);
}

// What a later file says holds, by names in bytes; what is no NAME.conf is left alone.
TEST_BETWEEN(test_folder, make_folder, drop_folder)
{
    put_file("conf.d/9.conf", "drain_ms = 9\n");
    put_file("conf.d/10.conf", "drain_ms = 10\nspin_us = 10\n");
    put_file("conf.d/.hidden.conf", "wrong\n");
    put_file("conf.d/9.conf.dpkg-dist", "wrong\n");
    put_file("conf.d/.conf", "wrong\n");
    assert_int_equal(load_folder(), 0);
    assert_int_equal(config.drain_ms, 9);
    assert_int_equal(config.spin_us, 10);
    assert_int_equal(config.keep_seconds, 1);
    assert_int_equal(config.n_more_files, 2);
    assert_string_equal(source_of("drain_ms"), "conf.d/9.conf");
    assert_string_equal(source_of("spin_us"), "conf.d/10.conf");
    assert_string_equal(source_of("keep_seconds"), "file");
    assert_string_equal(source_of("workers"), "default");
}

TEST_BETWEEN(test_no_folder, make_folder, drop_folder)
{
    assert_int_equal(rmdir(path_of("conf.d")), 0);
    assert_int_equal(load_folder(), 0);
    put_file("conf.d", "");
    folder_refused("conf.d: is no folder");
}

// A key of a namespace is replaced as an option is; a format stands in one file, and may build on
// those of earlier files.
TEST_BETWEEN(test_folder_sections, make_folder, drop_folder)
{
    put_file("conf.d/1.conf", "[namespace a]\nuids = 1, 2\nhost_bytes = 10mb\n"
                              "share_prefixes_with = b, c\n[format mine]\nbase = oscar2\n");
    put_file("conf.d/2.conf", "[namespace a]\nuids = 3\nshare_prefixes_with = d\n"
                              "[format ours]\nbase = kivi2\nlayers = 0-1:mine\n");
    assert_int_equal(load_folder(), 0);
    assert_int_equal(config.n_namespaces, 1);
    assert_int_equal(config.namespaces[0].uids.n, 1);
    assert_int_equal(config.namespaces[0].uids.id[0], 3);
    assert_int_equal(config.namespaces[0].host_bytes, 10 << 20);
    assert_int_equal(config.namespaces[0].n_share_with, 1);
    assert_string_equal(config.namespaces[0].share_with[0], "d");
    assert_int_equal(config.n_formats, 2);
    assert_string_equal(config.own_formats[1].ranges[0].row.name, "mine");
    put_file("conf.d/3.conf", "[format mine]\nrecent = 64\n");
    folder_refused("conf.d/3.conf:1: [format mine] stands in an earlier file as well");
}

// Complaints name the file and the line.
TEST_BETWEEN(test_folder_errors, make_folder, drop_folder)
{
    char name[KVQ_CONFIG_NAME + 16];
    put_file("conf.d/1.conf", "\nspin_us = many\n");
    folder_refused("conf.d/1.conf:2: spin_us is");
    put_file("conf.d/1.conf", "drain_ms = 1\ndrain_ms = 2\n");
    folder_refused("conf.d/1.conf:2: drain_ms is set twice");
    put_file("conf.d/1.conf", "");
    snprintf(name, sizeof name, "conf.d/%0*d.conf", KVQ_CONFIG_NAME - 6, 1);
    put_file(name, "");
    assert_int_equal(load_folder(), 0);
    snprintf(name, sizeof name, "conf.d/%0*d.conf", KVQ_CONFIG_NAME - 5, 1);
    put_file(name, "");
    folder_refused("is longer than 63 bytes");
}

TEST_BETWEEN(test_folder_of_strangers, make_folder, drop_folder)
{
    assert_int_equal(chmod(path_of("conf.d"), 0777), 0);
    folder_refused("conf.d: everybody may write to it (mode 0777)");
    assert_int_equal(chmod(path_of("conf.d"), 0775), 0);
    assert_int_equal(load_folder(), 0);
    if (geteuid() != 0)
        return;
    assert_int_equal(chown(path_of("conf.d"), 4321, (gid_t)-1), 0);
    folder_refused("conf.d: belongs to user 4321");
}

// A file that everybody may write to is everybody's, whoever owns its folder.
TEST_BETWEEN(test_file_of_everybody, make_folder, drop_folder)
{
    put_file("conf.d/1.conf", "spin_us = 10\n");
    assert_int_equal(chmod(path_of("kvqd.conf"), 0660), 0);
    assert_int_equal(chmod(path_of("conf.d/1.conf"), 0660), 0);
    assert_int_equal(load_folder(), 0);
    assert_int_equal(chmod(path_of("conf.d/1.conf"), 0666), 0);
    folder_refused("conf.d/1.conf: everybody may write to it (mode 0666); chmod o-w");
    assert_int_equal(chmod(path_of("kvqd.conf"), 0602), 0);
    folder_refused("kvqd.conf: everybody may write to it (mode 0602); chmod o-w");
}

TEST_BETWEEN(test_many_files, make_folder, drop_folder)
{
    char name[64];
    for (int i = 0; i < KVQ_MAX_CONFIG_FILES; i++) {
        snprintf(name, sizeof name, "conf.d/%03d.conf", i);
        put_file(name, "spin_us = 5\n");
    }
    assert_int_equal(load_folder(), 0);
    put_file("conf.d/more.conf", "");
    folder_refused("conf.d: 65 files end in .conf; allowed are 64");
}

int main(void)
{
    return run_all(NULL, NULL);
}

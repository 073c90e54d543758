// SPDX-License-Identifier: Apache-2.0
//
// What is said of a misspelt format's name.
#include "kernels/choice.h"
#include "proto/format_hint.h"
#include "tests/kits/unit.h"

static const char *const own[] = {"mymix", "Chat.4"};

static void says(const char *name, const char *words)
{
    char out[128];
    kvq_format_hint(name, own, 2, out, sizeof out);
    assert_string_equal(out, words);
}

PLAIN_TEST(test_near_names)
{
    static const char *const meant_kvq2[] = {"kvq-2",        "KVQ2",         " kvq2", "kvq3",
                                             "kvq-2@mine",   "kvq-2:sink=0", "kvqq2", "KVQ2+f16",
                                             "oscar2+kvq-2", "int8@a+KVQ2",  "kvq2 "};
    for (size_t i = 0; i < sizeof meant_kvq2 / sizeof *meant_kvq2; i++)
        says(meant_kvq2[i], "; did you mean 'kvq2'?");
    says("mymxi", "; did you mean 'mymix'?");
    says("chat.4", "; did you mean 'Chat.4'?");
}

// The refusal itself has the stages, the suffix or the layer.
PLAIN_TEST(test_known_beginnings)
{
    says("oscar2:foo=3", "");
    says("oscar2-foo", "");
    says("kivi2+oscar2-foo", "");
    says("vecinfer-k4x99v4x8", "");
    says("mymix", "");
    says("mymix@book", "");
}

PLAIN_TEST(test_of_the_configuration)
{
    says("mymix-g64", "; 'mymix' of the configuration takes nothing behind it");
    says("mymix+f16", "; 'mymix' of the configuration takes nothing behind it");
}

// The recommended names come first, whatever the configuration has, and are of the table.
PLAIN_TEST(test_nothing_near)
{
    static const char *const many[] = {"a-name-of-the-configuration-1", "a-name-2-of-it"};
    char out[80];
    says("zzzzzz", "; try kvq2, oscar3, kivi4, oscar4, or of the configuration mymix, Chat.4");
    kvq_format_hint("zzzzzz", many, 2, out, sizeof out);
    assert_string_equal(out, "; try kvq2, oscar3, kivi4, oscar4");
    kvq_format_hint("zzzzzz", &many[1], 1, out, sizeof out);
    assert_string_equal(
        out, "; try kvq2, oscar3, kivi4, oscar4, or of the configuration a-name-2-of-it");
    for (const char *const *name = kvq_recommended_formats; *name; name++)
        assert_non_null(kvq_format_by_name(*name));
}

int main(void)
{
    return run_all(NULL, NULL);
}

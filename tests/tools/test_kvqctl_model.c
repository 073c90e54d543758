// SPDX-License-Identifier: Apache-2.0
//
// What kvqctl size takes from a config.json: texts as models have them, and such as no model should
// have.
#include <unistd.h>

#include "tests/kits/unit.h"
#include "tools/kvqctl/model.h"

// Keys that most of the texts below begin with.
#define PLAIN                                                                                      \
    "{\"num_hidden_layers\":8,\"num_key_value_heads\":2,\"num_attention_heads\":8,"                \
    "\"hidden_size\":512,\"head_dim\":128"

static const struct kvq__ctl_shape nothing;

// Layers with a window as letters: "LLG" is two with one, and one without.
static const char *letters(const struct kvq__ctl_model *m)
{
    static char text[KVQ_MAX_LAYERS + 1];
    for (uint32_t i = 0; i < m->layers; i++)
        text[i] = m->windows[i] ? 'L' : 'G';
    text[m->layers] = 0;
    return text;
}

static void check(const char *text, uint32_t kv_heads, uint32_t head_dim, const char *layers,
                  uint32_t window)
{
    struct kvq__ctl_model m;
    char why[512] = "";
    if (kvq__ctl_parse_model(text, strlen(text), &nothing, &m, why, sizeof why))
        fail_msg("%s: %s", text, why);
    assert_int_equal(m.kv_heads, kv_heads);
    assert_int_equal(m.head_dim, head_dim);
    assert_string_equal(letters(&m), layers);
    for (uint32_t i = 0; i < m.layers; i++)
        assert_int_equal(m.windows[i], layers[i] == 'L' ? window : 0);
}

static void check_refused(const char *text, const char *words)
{
    struct kvq__ctl_model m;
    char why[512] = "";
    int result = kvq__ctl_parse_model(text, strlen(text), &nothing, &m, why, sizeof why);
    if (result != -1 || !strstr(why, words))
        fail_msg("%s: %d, \"%s\" and not \"%s\"", text, result, why, words);
}

PLAIN_TEST(test_heads)
{
    check(PLAIN "}", 2, 128, "GGGGGGGG", 0);
    check("{\"num_hidden_layers\":2,\"num_attention_heads\":8,\"hidden_size\":512}", 8, 64, "GG",
          0);
    check("{\"num_hidden_layers\":2,\"num_attention_heads\":8,\"hidden_size\":512,"
          "\"num_key_value_heads\":null,\"head_dim\":null}",
          8, 64, "GG", 0);
    check("{\"vision_config\":{\"num_hidden_layers\":99},\"text_config\":" PLAIN "}}", 2, 128,
          "GGGGGGGG", 0);
}

// By layer_types, or, in files from before there was such a key, as transformers has it for the
// family.
PLAIN_TEST(test_sliding_layers)
{
    check(PLAIN ",\"sliding_window\":64,\"layer_types\":[\"sliding_attention\",\"full_attention\","
                "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
                "\"full_attention\",\"sliding_attention\"]}",
          2, 128, "LGGGGGGL", 64);
    check(PLAIN ",\"model_type\":\"mistral\",\"sliding_window\":4096}", 2, 128, "LLLLLLLL", 4096);
    check(PLAIN ",\"model_type\":\"mistral\",\"sliding_window\":null}", 2, 128, "GGGGGGGG", 0);
    check(PLAIN ",\"model_type\":\"gemma2\",\"sliding_window\":4096}", 2, 128, "LGLGLGLG", 4096);
    check(PLAIN ",\"model_type\":\"gemma3_text\",\"sliding_window\":512}", 2, 128, "LLLLLGLL", 512);
    check(PLAIN ",\"model_type\":\"gemma3_text\",\"sliding_window\":512,"
                "\"sliding_window_pattern\":3}",
          2, 128, "LLGLLGLL", 512);
    check(PLAIN ",\"model_type\":\"exaone4\",\"sliding_window\":9,\"sliding_window_pattern\":"
                "\"LLLG\"}",
          2, 128, "LLLGLLLG", 9);
    check(PLAIN ",\"model_type\":\"exaone4\",\"sliding_window\":null}", 2, 128, "GGGGGGGG", 0);
}

PLAIN_TEST(test_switched_windows)
{
    check(PLAIN ",\"model_type\":\"qwen2\",\"sliding_window\":64,\"max_window_layers\":6,"
                "\"use_sliding_window\":true}",
          2, 128, "GGGGGGLL", 64);
    check(PLAIN ",\"model_type\":\"qwen2\",\"sliding_window\":64,\"max_window_layers\":6,"
                "\"use_sliding_window\":false}",
          2, 128, "GGGGGGGG", 0);
    check(PLAIN ",\"model_type\":\"qwen3\",\"sliding_window\":64,\"max_window_layers\":6}", 2, 128,
          "GGGGGGGG", 0);
    check(PLAIN ",\"model_type\":\"other\",\"sliding_window\":64,\"use_sliding_window\":false}", 2,
          128, "GGGGGGGG", 0);
    check_refused(PLAIN ",\"model_type\":\"qwen3_moe\",\"sliding_window\":64,"
                        "\"use_sliding_window\":true}",
                  "which layers have the sliding window");
    check_refused(PLAIN ",\"model_type\":\"qwen2\",\"sliding_window\":64,"
                        "\"use_sliding_window\":true}",
                  "which layers have the sliding window");
}

// What the file does not say is named, with the option that says it; nothing is guessed.
PLAIN_TEST(test_missing)
{
    check_refused("{}", "num_hidden_layers is missing; give --layers N");
    check_refused("{\"num_hidden_layers\":2,\"head_dim\":64}",
                  "num_key_value_heads is missing; give --kv-heads N");
    check_refused("{\"num_hidden_layers\":2,\"num_key_value_heads\":2}",
                  "head_dim is missing; give --head-dim N");
    check_refused("{\"num_hidden_layers\":2,\"num_attention_heads\":3,\"hidden_size\":64}",
                  "64 over num_attention_heads 3 is no whole number");
    check_refused("{\"num_hidden_layers\":2,\"num_attention_heads\":16,\"hidden_size\":1024,"
                  "\"num_key_value_heads\":8,\"model_type\":\"qwen3\"}",
                  "head_dim is missing; give --head-dim N"); // it is 128, and not 64
    check_refused("{\"text_config\":{\"num_hidden_layers\":2,\"num_attention_heads\":8,"
                  "\"hidden_size\":512}}",
                  "num_key_value_heads is missing in text_config, which leaves out what "
                  "transformers presets; give --kv-heads N");
    check_refused("{\"num_hidden_layers\":2,\"num_attention_heads\":71,\"hidden_size\":4544,"
                  "\"multi_query\":true}",
                  "num_key_value_heads is missing; give --kv-heads N");
    check_refused(PLAIN ",\"model_type\":\"gemma2\"}",
                  "sliding_window is missing; give --window N");
    check_refused(PLAIN ",\"model_type\":\"mistral\"}", "sliding_window is missing");
    check_refused(PLAIN ",\"model_type\":\"other\",\"sliding_window\":64}",
                  "which layers have the sliding window (layer_types)");
}

PLAIN_TEST(test_options_stand_in)
{
    struct kvq__ctl_shape asked = {.layers = 3, .kv_heads = 5, .head_dim = 96, .window = 7};
    struct kvq__ctl_model m;
    char why[512];
    const char *text = "{\"text_config\":{\"model_type\":\"gemma2\",\"num_hidden_layers\":2}}";
    assert_int_equal(kvq__ctl_parse_model(text, strlen(text), &asked, &m, why, sizeof why), 0);
    assert_int_equal(m.kv_heads, 5);
    assert_int_equal(m.head_dim, 96);
    assert_int_equal(m.windows[2], 7);
    assert_string_equal(letters(&m), "LGL");
    text = PLAIN "}";
    assert_int_equal(kvq__ctl_parse_model(text, strlen(text), &asked, &m, why, sizeof why), -1);
    assert_string_equal(why, "no layer has a sliding window; leave out --window");
    text = PLAIN ",\"layer_types\":[\"full_attention\",\"full_attention\"]}";
    assert_int_equal(kvq__ctl_parse_model(text, strlen(text), &asked, &m, why, sizeof why), -1);
    assert_non_null(strstr(why, "2 elements, and the model 3 layers; leave out --layers"));
}

// Layers that no session has, and values that no model has.
PLAIN_TEST(test_refused)
{
    check_refused(PLAIN ",\"kv_lora_rank\":512}", "kv_lora_rank: size does not know multi-head");
    check_refused(PLAIN ",\"num_kv_shared_layers\":4}", "num_kv_shared_layers: size does not");
    check(PLAIN ",\"num_kv_shared_layers\":0,\"kv_lora_rank\":null,\"block_types\":[]}", 2, 128,
          "GGGGGGGG", 0);
    check_refused("{\"num_hidden_layers\":1,\"num_key_value_heads\":2,\"head_dim\":64,"
                  "\"layer_types\":[\"linear\\u001battention\"]}",
                  "layer_types has 'linear?attention'");
    check_refused(PLAIN ",\"layer_types\":[\"full_attention\"]}", "is the file damaged?");
    check_refused(PLAIN ",\"layer_types\":\"full\"}", "layer_types has 0 elements");
    check_refused("{\"num_hidden_layers\":1,\"num_key_value_heads\":2,\"head_dim\":64,"
                  "\"layer_types\":[7]}",
                  "layer_types has ''");
    static const char *const numbers[] = {"0", "-1", "257", "1.5", "1e300", "\"8\"", "[8]", "true"};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char text[128];
        snprintf(text, sizeof text, "{\"num_hidden_layers\":%s}", numbers[i]);
        check_refused(text, "num_hidden_layers is not a whole number from 1 to 256");
    }
    check_refused(PLAIN ",\"sliding_window_pattern\":0,\"sliding_window\":1}",
                  "sliding_window_pattern is not a whole number");
    check_refused(PLAIN ",\"sliding_window_pattern\":\"LX\",\"sliding_window\":1}",
                  "neither a number nor letters");
    check_refused("[]", "no JSON object");
    check_refused("", "no JSON object");
    const char *whole = PLAIN ",\"layer_types\":[\"full_attention\"]}";
    for (size_t i = 0; i < strlen(whole); i++) {
        char *cut = strndup(whole, i); // of its own length: a reader past it is seen
        check_refused(cut, "no JSON object");
        free(cut);
    }
}

static void check_file(const char *path, const char *words)
{
    struct kvq__ctl_model m;
    char why[1024];
    assert_int_equal(kvq__ctl_read_model(path, &nothing, &m, why, sizeof why), -1);
    assert_non_null(strstr(why, path));
    assert_non_null(strstr(why, words));
}

PLAIN_TEST(test_files)
{
    char dir[] = "/tmp/kvq-model-XXXXXX", path[64];
    struct kvq__ctl_model m;
    char why[512];
    assert_non_null(mkdtemp(dir));
    check_file(dir, "/config.json: No such file or directory");
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(PLAIN "}", file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(kvq__ctl_read_model(dir, &nothing, &m, why, sizeof why), 0);
    assert_int_equal(kvq__ctl_read_model(path, &nothing, &m, why, sizeof why), 0);
    assert_int_equal(m.layers, 8);
    assert_int_equal(truncate(path, 1 << 20), 0);
    check_file(path, "is longer than 1 MiB");
    assert_int_equal(truncate(path, 5), 0);
    check_file(path, "no JSON object");
    unlink(path);
    rmdir(dir);
}

int main(void)
{
    return run_all(NULL, NULL);
}

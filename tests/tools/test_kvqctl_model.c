// SPDX-License-Identifier: Apache-2.0
//
// What kvqctl size takes from a config.json: texts as models have them, and such as no model should
// have.
#include <sys/stat.h>
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

// Keys of families of which some layers have no K and V, or others: each is refused by its name.
PLAIN_TEST(test_layers_that_are_none)
{
    static const char *const keys[] = {
        "block_configs\":[{\"attention\":{}}]", // Nemotron, DeciLM
        "attn_layer_indices\":[9,18,27]",       // Bamba
        "full_attn_idxs\":[2,5,8]",             // LFM2
        "cross_attention_layers\":[3,8]",       // Mllama
        "hybrid_layer_ids\":[6]",               // Zamba 2
        "layer_group_size\":6",                 // Bailing
        "linear_attn_config\":{\"kda\":[1]}",   // Kimi Linear
        "mb_per_layer\":2",                     // Phi 4 mini flash
        "hybrid_layer_pattern\":[0,1]",         // MiMo V2
        "swa_num_key_value_heads\":8",
        "swa_head_dim\":64",                   // Inkling
        "num_key_value_heads_per_layer\":[1]", // Sapiens 2
        "num_global_key_value_heads\":4",      // Gemma 4
        "attention_other_setting\":{\"a\":1}", // Step 3.5
        "kv_source_layers\":[0]",              // Mistral Large 4
        "kv_reuse_group\":[[0,1]]",            // Hymba
        "use_cla\":true",                      // HunYuan
        "n_recurrent_loops\":2",               // Dory
        "loop_num_passes\":3",                 // Inkling 2
        "add_cross_attention\":true",
        "compress_ratios\":[4]", // DeepSeek V4
        "compress_rates\":{\"a\":4}",
        "index_topk\":2048", // GLM, HY
        "indexer_kv_heads\":1",
        "index_block_size\":64", // MiniMax M3
        "sparse_attention_config\":{\"a\":1}",
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char text[256], words[64];
        snprintf(text, sizeof text, PLAIN ",\"%s}", keys[i]);
        snprintf(words, sizeof words, "%.*s: size does not know", (int)strcspn(keys[i], "\""),
                 keys[i]);
        check_refused(text, words);
    }
    check(PLAIN ",\"attn_layer_indices\":null,\"add_cross_attention\":false,\"use_cla\":false}", 2,
          128, "GGGGGGGG", 0);
}

// Dimensions and heads under other words, or left to each layer.
PLAIN_TEST(test_other_words)
{
    check(PLAIN ",\"v_head_dim\":128}", 2, 128, "GGGGGGGG", 0);
    check(PLAIN ",\"v_head_dim\":null}", 2, 128, "GGGGGGGG", 0);
    check_refused(PLAIN ",\"v_head_dim\":64}", "v_head_dim is not head_dim (128)");
#define HIDDEN "{\"num_hidden_layers\":2,\"num_attention_heads\":8,\"hidden_size\":512,"
    check(HIDDEN "\"num_key_value_heads\":null,\"eos_token_id\":[1,2,3]}", 8, 64, "GG", 0);
    check_refused(HIDDEN "\"num_key_value_heads\":null,\"blocks\":[{},{}]}",
                  "num_key_value_heads is missing; give --kv-heads N");
    check_refused(HIDDEN "\"num_attention_groups\":2}", "num_key_value_heads is missing");
    check_refused(HIDDEN "\"kv_n_heads\":2}", "num_key_value_heads is missing");
    static const char *const dims[] = {"kv_channels", "attention_head_dim", "attention_head_size",
                                       "d_kv"};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        char text[256];
        snprintf(text, sizeof text, HIDDEN "\"num_key_value_heads\":2,\"%s\":128}", dims[i]);
        check_refused(text, "head_dim is missing; give --head-dim N");
    }
    static const char *const windows[] = {"global_attn_every_n_layers",
                                          "prefix_dense_sliding_window_pattern",
                                          "local_layer_ids",
                                          "sliding_window_size",
                                          "interleaved_sliding_window",
                                          "local_attention",
                                          "attention_window_size",
                                          "attention_types"};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        char text[256];
        snprintf(text, sizeof text, PLAIN ",\"sliding_window_pattern\":4,\"%s\":[3]}", windows[i]);
        check_refused(text, "which layers have the sliding window (layer_types)");
        snprintf(text, sizeof text, PLAIN ",\"%s\":128}", windows[i]);
        check_refused(text, "which layers have the sliding window (layer_types)");
    }
    check("{\"num_hidden_layers\":2,\"num_key_value_heads\":2,\"head_dim\":64,"
          "\"global_attn_every_n_layers\":2,\"sliding_window\":32,"
          "\"layer_types\":[\"sliding_attention\",\"full_attention\"]}",
          2, 64, "LG", 32);
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
    assert_int_equal(mkfifo(path, 0600), 0);
    check_file(path, "not a regular file"); // and no wait for a writer
    unlink(path);
    rmdir(dir);
}

int main(void)
{
    return run_all(NULL, NULL);
}

// SPDX-License-Identifier: Apache-2.0
// Reading config.json. The file comes from elsewhere: each key is checked, and what the file does
// not say is not guessed. Where transformers has presets of its own for a family of models, they
// stand in the table of families.
#include "tools/kvqctl/model.h"

#include <cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/kernels.h"

enum { MOST_BYTES = 1 << 20, MOST_WIDTH = 1 << 20 };

// Which layers have the sliding window, where layer_types does not say it.
enum rule {
    UNKNOWN,
    ALL,
    NOT_EACH_NTH,     // all but the nth, the 2nth and so on
    FROM_A_LAYER,     // those from max_window_layers on, if use_sliding_window is true
    ONLY_IF_SWITCHED, // none, unless use_sliding_window is true; then nobody says which
};

static const struct family {
    const char *type; // model_type
    enum rule rule;
    uint32_t nth;
    // Without the keys head_dim and sliding_window they are numbers that only transformers knows.
    bool own_dim, own_window;
} families[] = {
    {"mistral", ALL, 0, false, true},
    {"mixtral", ALL, 0, false, false},
    {"ministral", ALL, 0, false, true},
    {"phi3", ALL, 0, false, false},
    {"starcoder2", ALL, 0, false, false},
    {"gemma", UNKNOWN, 0, true, false},
    {"gemma2", NOT_EACH_NTH, 2, true, true},
    {"gemma3_text", NOT_EACH_NTH, 6, true, true},
    {"gpt_oss", NOT_EACH_NTH, 2, true, true},
    {"cohere2", NOT_EACH_NTH, 4, false, true},
    {"olmo3", NOT_EACH_NTH, 4, false, true},
    {"exaone4", NOT_EACH_NTH, 4, false, true},
    {"qwen2", FROM_A_LAYER, 0, false, false},
    {"qwen3", FROM_A_LAYER, 0, true, false},
    {"qwen2_moe", ONLY_IF_SWITCHED, 0, false, false},
    {"qwen3_moe", ONLY_IF_SWITCHED, 0, false, false},
    {"smollm3", ONLY_IF_SWITCHED, 0, false, false},
};
static const struct family other_family = {"", UNKNOWN, 0, false, false};

// Keys that say, unless they are null, false, 0 or empty, that layers are none of those that a
// session has.
static const struct {
    const char *key, *what;
} refusals[] = {
    {"is_encoder_decoder", "encoder-decoder models"},
    {"kv_lora_rank", "multi-head latent attention (MLA)"},
    {"num_kv_shared_layers", "layers that read other layers' K and V"},
    {"kv_source_layers", "layers that read other layers' K and V"},
    {"kv_reuse_group", "layers that read other layers' K and V"},
    {"use_cla", "layers that read other layers' K and V"},
    {"n_recurrent_loops", "layers that are run several times"},
    {"loop_num_passes", "layers that are run several times"},
    {"cross_attention_layers", "layers with cross-attention"},
    {"add_cross_attention", "layers with cross-attention"},
    {"compress_ratios", "K and V of several tokens in one"},
    {"compress_rates", "K and V of several tokens in one"},
    {"index_topk", "keys of an indexer"},
    {"indexer_kv_heads", "keys of an indexer"},
    {"index_block_size", "keys of an indexer"},
    {"sparse_attention_config", "keys of an indexer"},
    {"attention_chunk_size", "attention in chunks"},
    {"use_bidirectional_attention", "attention to tokens that come later"},
    {"per_layer_config", "layers with other heads or dimensions than others"},
    {"block_configs", "layers with other heads than others, or with none"},
    {"num_key_value_heads_per_layer", "layers with other heads than others"},
    {"num_global_key_value_heads", "layers with other heads than others"},
    {"swa_num_key_value_heads", "layers with other heads than others"},
    {"attention_other_setting", "layers with other heads than others"},
    {"swa_head_dim", "layers with other dimensions than others"},
    {"global_head_dim", "layers with other dimensions than others"},
    {"full_attention_interval", "layers without K and V"},
    {"attn_layer_period", "layers without K and V"},
    {"attn_layer_indices", "layers without K and V"},
    {"full_attn_idxs", "layers without K and V"},
    {"hybrid_layer_ids", "layers without K and V"},
    {"layer_group_size", "layers without K and V"},
    {"linear_attn_config", "layers without K and V"},
    {"mb_per_layer", "layers without K and V"},
    {"hybrid_override_pattern", "layers without K and V"},
    {"hybrid_layer_pattern", "layers of several kinds by numbers"},
    {"layers_block_type", "layers without K and V"},
    {"block_types", "layers without K and V"},
    {"attn_type_list", "layers without K and V"},
};

// Other words for num_key_value_heads. Where one stands, the number of query heads is not that of
// the KV heads, and each family reads them in its own way.
static const char *const other_heads[] = {"multi_query", "multi_query_group_num", "num_kv_heads",
                                          "n_head_kv",   "num_attention_groups",  "kv_n_heads",
                                          NULL};

// Other words for head_dim. Where one stands, it is not hidden_size over the query heads.
static const char *const other_dims[] = {"kv_channels", "attention_head_dim", "attention_head_size",
                                         "d_kv", NULL};

// Other words for a sliding window, or for which layers have it.
static const char *const other_windows[] = {"global_attn_every_n_layers",
                                            "prefix_dense_sliding_window_pattern",
                                            "local_layer_ids",
                                            "sliding_window_size",
                                            "interleaved_sliding_window",
                                            "local_attention",
                                            "attention_window_size",
                                            "attention_types",
                                            NULL};

// One reading of a file.
struct reading {
    const cJSON *json;
    bool nested; // the text model of a larger one, of which the file leaves out what is preset
    const struct family *family;
    const struct kvq__ctl_shape *asked;
    struct kvq__ctl_model *model;
    char *why;
    size_t n;
};

__attribute__((format(printf, 2, 3))) static int refuse(struct reading *r, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->why, r->n, format, arguments);
    va_end(arguments);
    return -1;
}

// NULL: it is not there, or null.
static const cJSON *get(const struct reading *r, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->json, key);
    return cJSON_IsNull(item) ? NULL : item;
}

static bool says(const struct reading *r, const char *key)
{
    const cJSON *item = get(r, key);
    return item && !cJSON_IsFalse(item) && !(cJSON_IsNumber(item) && item->valuedouble == 0) &&
           !((cJSON_IsArray(item) || cJSON_IsObject(item)) && !item->child);
}

static bool says_one_of(const struct reading *r, const char *const *keys)
{
    while (*keys && !says(r, *keys))
        keys++;
    return *keys != NULL;
}

// Whether a list, other than of the layers' windows, has as many elements as there are layers.
static bool lists_layers(const struct reading *r)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, r->json)
    {
        if (cJSON_IsArray(item) && strcmp(item->string, "layer_types") &&
            cJSON_GetArraySize(item) == (int)r->model->layers)
            return true;
    }
    return false;
}

static bool is_whole(const cJSON *item, uint32_t least, uint32_t most)
{
    double d = item->valuedouble;
    return cJSON_IsNumber(item) && d >= least && d <= most && d == floor(d);
}

// A whole number from `least` to `most`; 0 where the key is not there.
static int count(struct reading *r, const char *key, uint32_t least, uint32_t most, uint32_t *value)
{
    const cJSON *item = get(r, key);
    *value = 0;
    if (!item)
        return 0;
    if (!is_whole(item, least, most))
        return refuse(r, "%s is not a whole number from %u to %u", key, least, most);
    *value = (uint32_t)item->valuedouble;
    return 0;
}

static int missing(struct reading *r, const char *key, const char *option)
{
    return refuse(r, "%s is missing%s; give %s", key,
                  r->nested ? " in text_config, which leaves out what transformers presets" : "",
                  option);
}

static int check_kind(struct reading *r)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (says(r, refusals[i].key))
            return refuse(r,
                          "%s: size does not know %s; give the numbers of the layers that have a "
                          "cache by --layers, --kv-heads, --head-dim and --window, without --model",
                          refusals[i].key, refusals[i].what);
    const cJSON *type = get(r, "model_type");
    r->family = &other_family;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (cJSON_IsString(type) && strcmp(type->valuestring, families[i].type) == 0)
            r->family = &families[i];
    return 0;
}

static int take_kv_heads(struct reading *r)
{
    uint32_t q_heads;
    r->model->kv_heads = r->asked->kv_heads;
    if (r->model->kv_heads)
        return 0;
    if (count(r, "num_key_value_heads", 1, KVQ_MAX_HEADS, &r->model->kv_heads) ||
        count(r, "num_attention_heads", 1, KVQ_MAX_HEADS, &q_heads))
        return -1;
    if (r->model->kv_heads)
        return 0;
    // Without GQA they are the query heads; but null may also say that each layer has its own.
    bool null = cJSON_GetObjectItemCaseSensitive(r->json, "num_key_value_heads") != NULL;
    bool same = !r->nested && !says_one_of(r, other_heads) && !(null && lists_layers(r));
    r->model->kv_heads = same ? q_heads : 0;
    return r->model->kv_heads ? 0 : missing(r, "num_key_value_heads", "--kv-heads N");
}

static int take_head_dim(struct reading *r)
{
    uint32_t hidden, q_heads;
    r->model->head_dim = r->asked->head_dim;
    if (r->model->head_dim)
        return 0;
    if (count(r, "head_dim", 1, KVQ_MAX_HEAD_DIM, &r->model->head_dim) ||
        count(r, "hidden_size", 1, MOST_WIDTH, &hidden) ||
        count(r, "num_attention_heads", 1, KVQ_MAX_HEADS, &q_heads))
        return -1;
    if (r->model->head_dim)
        return 0;
    if (r->nested || r->family->own_dim || says_one_of(r, other_dims) || !hidden || !q_heads)
        return missing(r, "head_dim", "--head-dim N");
    if (hidden % q_heads || hidden / q_heads > KVQ_MAX_HEAD_DIM)
        return refuse(r,
                      "head_dim is missing, and hidden_size %u over num_attention_heads %u is no "
                      "whole number up to %d; give --head-dim N",
                      hidden, q_heads, KVQ_MAX_HEAD_DIM);
    r->model->head_dim = hidden / q_heads;
    return 0;
}

// Sessions have as many channels of V as of K.
static int check_v_dim(struct reading *r)
{
    const cJSON *v = get(r, "v_head_dim");
    if (!v || (cJSON_IsNumber(v) && v->valuedouble == r->model->head_dim))
        return 0;
    return refuse(r, "v_head_dim is not head_dim (%u), and no session has V of another dimension",
                  r->model->head_dim);
}

// By layer_types, which says it of each layer.
static int take_types(struct reading *r, const cJSON *types, bool slides[KVQ_MAX_LAYERS])
{
    int listed = cJSON_GetArraySize(types);
    if (!cJSON_IsArray(types) || listed != (int)r->model->layers)
        return refuse(r, "layer_types has %d elements, and the model %u layers; %s", listed,
                      r->model->layers,
                      r->asked->layers ? "leave out --layers" : "is the file damaged?");
    const cJSON *type;
    size_t i = 0;
    cJSON_ArrayForEach(type, types)
    {
        const char *word = cJSON_IsString(type) ? type->valuestring : "";
        slides[i++] = strcmp(word, "sliding_attention") == 0;
        if (!slides[i - 1] && strcmp(word, "full_attention"))
            return refuse(r,
                          "layer_types has '%.40s'; size knows full_attention and "
                          "sliding_attention. Give the numbers of the layers that have a cache by "
                          "--layers, --kv-heads, --head-dim and --window, without --model",
                          kvq__ctl_clean(word));
    }
    return 0;
}

// "LLLG": local layers, with a window, and global ones, over and over.
static int take_letters(struct reading *r, const char *letters, bool slides[KVQ_MAX_LAYERS])
{
    size_t n = strlen(letters);
    if (n == 0 || strspn(letters, "LG") != n)
        return refuse(r, "sliding_window_pattern '%.20s' is neither a number nor letters L and G",
                      kvq__ctl_clean(letters));
    for (uint32_t i = 0; i < r->model->layers; i++)
        slides[i] = letters[i % n] == 'L';
    return 0;
}

// By the family's rule, for files that were written before there was layer_types.
static int take_rule(struct reading *r, bool slides[KVQ_MAX_LAYERS])
{
    const cJSON *pattern = get(r, "sliding_window_pattern");
    pattern = pattern ? pattern : get(r, "_sliding_window_pattern");
    enum rule rule = pattern ? NOT_EACH_NTH : r->family->rule;
    uint32_t from = 0, nth = r->family->nth;
    if (cJSON_IsString(pattern))
        return take_letters(r, pattern->valuestring, slides);
    if (pattern && !is_whole(pattern, 1, KVQ_MAX_LAYERS))
        return refuse(r, "sliding_window_pattern is not a whole number from 1 to %d",
                      KVQ_MAX_LAYERS);
    nth = pattern ? (uint32_t)pattern->valuedouble : nth;
    if (rule == FROM_A_LAYER && count(r, "max_window_layers", 0, 1 << 20, &from))
        return -1;
    if (rule == UNKNOWN || rule == ONLY_IF_SWITCHED || says_one_of(r, other_windows) ||
        (rule == FROM_A_LAYER && !get(r, "max_window_layers")))
        return refuse(r,
                      "the file does not say which layers have the sliding window (layer_types); "
                      "ask for each kind of layers by --layers and --window, without --model");
    for (uint32_t i = 0; i < r->model->layers; i++)
        slides[i] = rule == NOT_EACH_NTH ? (i + 1) % nth != 0 : i >= from;
    return 0;
}

// Whether layers have windows at all, where only a rule says which. Models without them have the
// key as null, or not at all.
static bool is_switched_on(const struct reading *r)
{
    const cJSON *use = get(r, "use_sliding_window");
    bool preset = r->family->rule != FROM_A_LAYER && r->family->rule != ONLY_IF_SWITCHED;
    if (says_one_of(r, other_windows))
        return true;
    if (use ? !cJSON_IsTrue(use) : !preset)
        return false;
    if (cJSON_GetObjectItemCaseSensitive(r->json, "sliding_window"))
        return get(r, "sliding_window") != NULL;
    return use || r->family->own_window;
}

static int take_windows(struct reading *r)
{
    bool slides[KVQ_MAX_LAYERS] = {false};
    const cJSON *types = get(r, "layer_types");
    uint32_t window, some = 0;
    if (types ? take_types(r, types, slides) : is_switched_on(r) && take_rule(r, slides))
        return -1;
    for (uint32_t i = 0; i < r->model->layers; i++)
        some += slides[i];
    if (!some && r->asked->window)
        return refuse(r, "no layer has a sliding window; leave out --window");
    if (some && count(r, "sliding_window", 1, KVQ_MAX_SESSION_TOKENS, &window))
        return -1;
    window = r->asked->window ? r->asked->window : some ? window : 0;
    if (some && !window)
        return missing(r, "sliding_window", "--window N");
    for (uint32_t i = 0; i < r->model->layers; i++)
        r->model->windows[i] = slides[i] ? window : 0;
    return 0;
}

static int take_model(struct reading *r)
{
    const cJSON *inner = get(r, "text_config");
    if (!cJSON_IsObject(r->json))
        return refuse(r, "the file holds no JSON object; --model is a model's config.json, or the "
                         "folder that has it");
    r->nested = cJSON_IsObject(inner);
    r->json = r->nested ? inner : r->json;
    if (check_kind(r) || count(r, "num_hidden_layers", 1, KVQ_MAX_LAYERS, &r->model->layers))
        return -1;
    r->model->layers = r->asked->layers ? r->asked->layers : r->model->layers;
    if (!r->model->layers)
        return missing(r, "num_hidden_layers", "--layers N");
    return take_kv_heads(r) || take_head_dim(r) || check_v_dim(r) || take_windows(r) ? -1 : 0;
}

int kvq__ctl_parse_model(const char *text, size_t bytes, const struct kvq__ctl_shape *asked,
                         struct kvq__ctl_model *model, char *why, size_t n)
{
    cJSON *json = cJSON_ParseWithLength(text, bytes);
    struct reading r = {.json = json, .asked = asked, .model = model, .why = why, .n = n};
    memset(model, 0, sizeof *model);
    int result = take_model(&r);
    cJSON_Delete(json);
    return result;
}

static int read_file(FILE *file, const struct kvq__ctl_shape *asked, struct kvq__ctl_model *model,
                     char *why, size_t n)
{
    char *text = malloc(MOST_BYTES);
    size_t bytes = text ? fread(text, 1, MOST_BYTES, file) : 0;
    int result = -1;
    if (!text)
        snprintf(why, n, "no memory to read it");
    else if (ferror(file))
        snprintf(why, n, "cannot be read: %s", strerror(errno));
    else if (bytes == MOST_BYTES)
        snprintf(why, n, "is longer than 1 MiB, and no config.json");
    else
        result = kvq__ctl_parse_model(text, bytes, asked, model, why, n);
    free(text);
    return result;
}

// A FIFO, or a device, would keep us waiting for what it never says.
static FILE *open_regular(const char *path, char *why, size_t n)
{
    struct stat is;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool regular = fd >= 0 && fstat(fd, &is) == 0 && S_ISREG(is.st_mode);
    FILE *file = regular ? fdopen(fd, "r") : NULL;
    if (!file)
        snprintf(why, n, "cannot open %s: %s", kvq__ctl_clean(path),
                 fd >= 0 && !regular ? "not a regular file" : strerror(errno));
    if (!file && fd >= 0)
        close(fd);
    return file;
}

int kvq__ctl_read_model(const char *path, const struct kvq__ctl_shape *asked,
                        struct kvq__ctl_model *model, char *why, size_t n)
{
    char inside[PATH_MAX], said[512];
    struct stat is;
    bool folder = stat(path, &is) == 0 && S_ISDIR(is.st_mode);
    int length = snprintf(inside, sizeof inside, "%s%s", path, folder ? "/config.json" : "");
    if ((size_t)length >= sizeof inside) {
        snprintf(why, n, "cannot open %s: %s", kvq__ctl_clean(inside), strerror(ENAMETOOLONG));
        return -1;
    }
    FILE *file = open_regular(inside, why, n);
    if (!file)
        return -1;
    int result = read_file(file, asked, model, said, sizeof said);
    if (result)
        snprintf(why, n, "%s: %s", kvq__ctl_clean(inside), said);
    fclose(file);
    return result;
}

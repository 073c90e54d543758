// SPDX-License-Identifier: Apache-2.0
//
// Reading config.json: the keys of decoder-only models of the Llama family.
#include "tools/kvq-run/config.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

static const cJSON *get(const cJSON *json, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    return cJSON_IsNull(item) ? NULL : item;
}

static int number(const cJSON *json, const char *key, double preset, double *out, struct problem *p)
{
    const cJSON *item = get(json, key);
    *out = preset;
    if (!item)
        return 0;
    if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble))
        return problem_set(p, RUN_FAILED, "config.json: %s is not a number", key);
    *out = item->valuedouble;
    return 0;
}

// preset 0: the key must be there.
static int count(const cJSON *json, const char *key, uint32_t preset, uint32_t most, uint32_t *out,
                 struct problem *p)
{
    double d;
    if (number(json, key, preset, &d, p))
        return -1;
    if (!(d >= 1 && d <= most) || d != floor(d))
        return problem_set(p, RUN_FAILED,
                           "config.json: %s is %g; it must be a whole number from 1 "
                           "to %u",
                           key, d, most);
    *out = (uint32_t)d;
    return 0;
}

static bool flag(const cJSON *json, const char *key)
{
    return cJSON_IsTrue(get(json, key));
}

static const char *string(const cJSON *json, const char *key, const char *preset)
{
    const cJSON *item = get(json, key);
    return cJSON_IsString(item) ? item->valuestring : preset;
}

static int parse_llama3(const cJSON *s, struct rope_config *r, struct problem *p)
{
    r->kind = ROPE_LLAMA3;
    if (number(s, "low_freq_factor", 1, &r->low_freq_factor, p) ||
        number(s, "high_freq_factor", 4, &r->high_freq_factor, p) ||
        count(s, "original_max_position_embeddings", 8192, 1 << 30, &r->original_positions, p))
        return -1;
    if (!(r->high_freq_factor > r->low_freq_factor && r->low_freq_factor > 0))
        return problem_set(p, RUN_FAILED,
                           "config.json: rope_scaling's frequency factors %g and %g "
                           "must be positive and in ascending order",
                           r->low_freq_factor, r->high_freq_factor);
    return 0;
}

static int parse_yarn(const cJSON *s, uint32_t positions, struct rope_config *r, struct problem *p)
{
    r->kind = ROPE_YARN;
    if (number(s, "beta_fast", 32, &r->beta_fast, p) ||
        number(s, "beta_slow", 1, &r->beta_slow, p) ||
        number(s, "attention_factor", 0.1 * log(r->factor) + 1, &r->attention_factor, p) ||
        count(s, "original_max_position_embeddings", positions, 1 << 30, &r->original_positions, p))
        return -1;
    if (get(s, "mscale") || get(s, "mscale_all_dim"))
        return problem_set(p, RUN_FAILED, "config.json: yarn with mscale is not supported");
    return 0;
}

static int parse_rope(const cJSON *json, uint32_t positions, struct rope_config *r,
                      struct problem *p)
{
    const cJSON *s = get(json, "rope_scaling");
    const cJSON *newer = get(json, "rope_parameters"); // transformers 5 keeps both in one object
    *r = (struct rope_config){.factor = 1, .attention_factor = 1};
    if (number(newer ? newer : json, "rope_theta", 10000, &r->theta, p))
        return -1;
    if (!(r->theta > 1))
        return problem_set(p, RUN_FAILED, "config.json: rope_theta is %g; it must be above 1",
                           r->theta);
    if (!s)
        s = newer;
    const char *kind = string(s, "rope_type", string(s, "type", "default"));
    if (!s || !strcmp(kind, "default"))
        return 0;
    if (number(s, "factor", 1, &r->factor, p))
        return -1;
    if (!(r->factor >= 1))
        return problem_set(p, RUN_FAILED,
                           "config.json: rope_scaling's factor is %g; it must be at "
                           "least 1",
                           r->factor);
    if (!strcmp(kind, "linear")) {
        r->kind = ROPE_LINEAR;
        return 0;
    }
    if (!strcmp(kind, "llama3"))
        return parse_llama3(s, r, p);
    if (!strcmp(kind, "yarn"))
        return parse_yarn(s, positions, r, p);
    return problem_set(p, RUN_FAILED,
                       "config.json: rope_scaling of type '%.40s' is not supported; "
                       "default, linear, llama3 and yarn are",
                       kind);
}

static int parse_family(const cJSON *json, struct config *c, struct problem *p)
{
    static const char *const families[] = {"llama", "mistral", "qwen2", "qwen3"};
    const char *family = string(json, "model_type", "(none)");
    snprintf(c->family, sizeof c->family, "%.31s", family);
    bool known = false;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        known |= !strcmp(family, families[i]);
    if (!known)
        return problem_set(p, RUN_FAILED,
                           "config.json: model_type '%.40s' is not supported; llama, "
                           "mistral, qwen2 and qwen3 are",
                           family);
    const char *act = string(json, "hidden_act", "silu");
    if (strcmp(act, "silu"))
        return problem_set(p, RUN_FAILED,
                           "config.json: hidden_act '%.40s' is not supported; silu "
                           "is",
                           act);
    if (get(json, "quantization_config"))
        return problem_set(p, RUN_FAILED,
                           "config.json: quantized weights are not supported; use a "
                           "checkpoint in fp32, bf16 or fp16");
    if (get(json, "num_local_experts") || get(json, "num_experts"))
        return problem_set(p, RUN_FAILED, "config.json: mixtures of experts are not supported");
    return 0;
}

static int parse_window(const cJSON *json, struct config *c, struct problem *p)
{
    bool uses = strcmp(c->family, "qwen2") && strcmp(c->family, "qwen3");
    const cJSON *use = get(json, "use_sliding_window");
    if (use)
        uses = cJSON_IsTrue(use);
    if (!uses || !get(json, "sliding_window"))
        return 0;
    double from;
    if (count(json, "sliding_window", 0, 1 << 30, &c->window, p) ||
        number(json, "max_window_layers", 0, &from, p))
        return -1;
    bool per_layer = !strcmp(c->family, "qwen2") || !strcmp(c->family, "qwen3");
    c->window_from = per_layer && from > 0 && from < CONFIG_MAX_LAYERS ? (uint32_t)from : 0;
    return 0;
}

static int parse_shape(const cJSON *json, struct config *c, struct problem *p)
{
    if (count(json, "hidden_size", 0, CONFIG_MAX_WIDTH, &c->hidden, p) ||
        count(json, "intermediate_size", 0, CONFIG_MAX_WIDTH, &c->intermediate, p) ||
        count(json, "num_hidden_layers", 0, CONFIG_MAX_LAYERS, &c->layers, p) ||
        count(json, "num_attention_heads", 0, CONFIG_MAX_HEADS, &c->q_heads, p) ||
        count(json, "num_key_value_heads", c->q_heads, CONFIG_MAX_HEADS, &c->kv_heads, p) ||
        count(json, "vocab_size", 0, CONFIG_MAX_WIDTH, &c->vocab, p) ||
        count(json, "max_position_embeddings", 2048, 1 << 30, &c->positions, p))
        return -1;
    if (!get(json, "head_dim") && c->hidden % c->q_heads)
        return problem_set(p, RUN_FAILED, "config.json: hidden_size %u is no multiple of %u heads",
                           c->hidden, c->q_heads);
    if (count(json, "head_dim", c->hidden / c->q_heads, 4096, &c->head_dim, p))
        return -1;
    if (c->q_heads % c->kv_heads || c->head_dim % 2)
        return problem_set(p, RUN_FAILED,
                           "config.json: %u query heads, %u KV heads and head_dim "
                           "%u do not fit together",
                           c->q_heads, c->kv_heads, c->head_dim);
    return 0;
}

static int parse_object(const cJSON *json, struct config *c, struct problem *p)
{
    double bos;
    if (!cJSON_IsObject(json))
        return problem_set(p, RUN_FAILED, "config.json is not a JSON object");
    if (parse_family(json, c, p) || parse_shape(json, c, p) || parse_window(json, c, p) ||
        parse_rope(json, c->positions, &c->rope, p) ||
        number(json, "rms_norm_eps", 1e-6, &c->norm_eps, p) ||
        number(json, "bos_token_id", -1, &bos, p))
        return -1;
    c->tied_head = flag(json, "tie_word_embeddings");
    c->bos = bos >= 0 && bos < c->vocab ? (int64_t)bos : -1;
    c->bytes = c->vocab >= 256 && c->vocab <= 260;
    return 0;
}

int config_parse(const char *text, uint64_t bytes, struct config *c, struct problem *p)
{
    memset(c, 0, sizeof *c);
    cJSON *json = cJSON_ParseWithLength(text, bytes);
    int rc = parse_object(json, c, p);
    cJSON_Delete(json);
    return rc;
}

int config_read(const char *dir, struct config *c, struct problem *p)
{
    enum { MOST = 1 << 20 };
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s/config.json", dir) >= sizeof path)
        return problem_set(p, RUN_FAILED, "the model's path is too long");
    FILE *f = fopen(path, "re");
    if (!f)
        return problem_set(p, RUN_FAILED, "cannot open %s: %s", path, strerror(errno));
    char *text = malloc(MOST);
    size_t n = text ? fread(text, 1, MOST, f) : 0;
    fclose(f);
    int rc = n && n < MOST ? config_parse(text, n, c, p)
                           : problem_set(p, RUN_FAILED, "%s is empty or over 1 MiB", path);
    free(text);
    return rc;
}

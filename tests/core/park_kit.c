// SPDX-License-Identifier: Apache-2.0
//
// See park_kit.h.
#include "tests/core/park_kit.h"

int setup_saves(void **state)
{
    kit_saves(true);
    return setup(state);
}

int teardown_saves(void **state)
{
    int rc = teardown(state);
    kit_saves(false);
    return rc;
}

const struct kvq__session *session_of(uint64_t handle)
{
    return kit_of(&m, handle);
}

void settle(void)
{
    vault_serve(&vault, kit.core);
    core_check(kit.core);
}

struct kvq__move_info ask(uint64_t id)
{
    struct kvq__move_info info;
    assert_int_equal(kvq__move_info(kit.core, &admin, id, &info, text), 0);
    return info;
}

int park(uint64_t handle)
{
    struct kvq__move_info info;
    kit_pack(&kit);
    int rc = kvq__session_park(m.client, handle, &info, text);
    if (rc < 0)
        return rc;
    assert_string_equal(info.place, "disk");
    settle();
    info = ask(info.id);
    assert_true(info.finished);
    snprintf(text, sizeof text, "%s", info.text);
    return info.status;
}

void away(uint64_t handle)
{
    int rc = park(handle);
    if (rc)
        fail_msg("%s", text);
    assert_true(kvq__is_offloaded(session_of(handle)));
}

void wake(uint64_t handle)
{
    struct kvq_entry_wire e = {
        .handle = handle, .position = session_of(handle)->tokens, .queries = QUERIES};
    struct kvq_request r = attend_of(0);
    assert_int_equal(kit_request(&m, &r, &e), 1);
    core_check(kit.core);
    settle();
    assert_int_equal(kit_again(&m), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, 0);
}

void refused(uint64_t handle, int code, const char *why)
{
    struct kvq__move_info info;
    assert_int_equal(kvq__session_park(m.client, handle, &info, text), code);
    assert_says(text, why);
    assert_false(kvq__is_offloaded(session_of(handle)));
    core_check(kit.core);
}

struct kvq__restore *begin_fetch(uint64_t handle, struct kvq__store_job *job)
{
    struct kvq__restore *r;
    kvq__fetch_ask(kit_of(&m, handle));
    assert_true(kvq__park_next(kit.core, job));
    assert_int_equal(job->kind, KVQ__JOB_FETCH);
    assert_int_equal(vault_fetch(&vault, kit.core, job, &r), 0);
    return r;
}

struct kvq__save *begin_writing(uint64_t handle, struct kvq__store_job *job, uint64_t *ticket)
{
    struct kvq__move_info info;
    struct kvq__save_spec spec = {.unnamed = true, .parks = true};
    assert_int_equal(kvq__session_park(m.client, handle, &info, text), 0);
    *ticket = info.id;
    assert_true(kvq__park_next(kit.core, job));
    assert_int_equal(job->kind, KVQ__JOB_SAVE);
    spec.name = job->session;
    return vault_copied(kit.core, &spec);
}

void end_writing(struct kvq__save *save, const struct kvq__store_job *job)
{
    vault_write(&vault, &save);
    kvq__park_saved(kit.core, job->id, 0, "");
    while (kvq__parks_poll(kit.core))
        core_check(kit.core);
}

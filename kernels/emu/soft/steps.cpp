// SPDX-License-Identifier: Apache-2.0
//
// Streams without threads: one thread does the work of all of them, in steps, and a seed decides
// which stream goes on when. So one seed is one order of everything, whatever the machine does.
//
// A step takes one stream whose next work waits for nothing any more. It does that work, and makes
// its completion known in the same step or in a later one, as the seed says: between the two all
// that the work did can be seen, and nobody is told yet. Some steps happen in every call, as many
// as are needed in calls that wait, and the rest when the test asks for them.
#include <stdlib.h>

#include "kernels/emu/soft/machine.h"

namespace soft
{
static struct {
    std::thread::id thread;          // that calls, and does the work
    uint64_t draws;                  // state of the generator
    std::vector<stream_ptr> streams; // that have work, in the order in which they got it
} steps;

static uint64_t draw()
{
    return mix(steps.draws++, m.seed);
}

static void check_thread()
{
    if (steps.thread != std::this_thread::get_id())
        fault(KVQ_GPU_LAUNCH_FAILED, "work is done in steps of one thread, and another calls");
}

// With m.order held.
void add_step(const stream_ptr &s)
{
    check_thread();
    if (s->tasks->tasks.size() == 1)
        steps.streams.push_back(s);
}

// Whether its next work can go on; what waits in memory that is gone goes on to the fault.
static bool can_step(const stream &s)
{
    const task &t = s.tasks->tasks.front();
    if (s.stepping || s.stalled || kvq_soft_control()->stall)
        return false;
    if (!t.ran && s.line->begun != t.turn - 1)
        return false;
    for (const waiting &one : t.what.first)
        if (!t.ran && look_at(one) == WAITING)
            return false;
    return true;
}

static void end_task(const stream_ptr &s)
{
    const uint64_t number = s->tasks->tasks.front().number;
    {
        guard g(m.order);
        s->tasks->tasks.pop_front();
        if (s->tasks->tasks.empty())
            for (auto at = steps.streams.begin(); at != steps.streams.end(); ++at)
                if (*at == s) {
                    steps.streams.erase(at);
                    break;
                }
    }
    if (!broken())
        publish(&s->completed, number);
}

static void step(const stream_ptr &s)
{
    task &t = s->tasks->tasks.front(); // a deque's elements stay where they are
    const uint64_t what = draw();
    if (!t.ran) {
        s->stepping = true;
        t.ran = perform(*s, t, what) == KVQ_GPU_OK;
        s->stepping = false;
        if (!t.ran)
            return;
        t.what = work();
    }
    if (what >> 32 & 3)
        end_task(s);
}

bool take_step()
{
    check_thread();
    const size_t n = steps.streams.size(), first = n ? draw() % n : 0;
    for (size_t i = 0; i < n && !broken(); i++) {
        const stream_ptr s = steps.streams[(first + i) % n];
        if (!can_step(*s))
            continue;
        step(s);
        return true;
    }
    return false;
}

// Half of the time nothing; some; or long chains of work.
void take_steps()
{
    const uint64_t what = draw();
    const unsigned kind = what % 8, size = (unsigned)(what >> 8 & 0xff);
    const unsigned n = kind < 4 ? 0 : kind < 7 ? 1 + size % 4 : size % 64;
    for (unsigned i = 0; i < n && take_step(); i++)
        ;
}

void step_for(const waiting &w)
{
    if (!take_step() && look_at(w) == WAITING && !broken())
        fault(KVQ_GPU_LAUNCH_FAILED, "a call waits for what no stream is going to do");
}
} // namespace soft

void kvq_soft_steps(uint64_t seed)
{
    soft::guard g(soft::m.order);
    for (const auto &s : soft::steps.streams)
        if (!s->tasks->tasks.empty())
            abort(); // work of before would go on in a new order
    soft::m.seed = seed;
    soft::steps.draws = 0;
    soft::steps.thread = std::this_thread::get_id();
    soft::m.in_steps = true;
}

bool kvq_soft_step(void)
{
    return soft::take_step();
}

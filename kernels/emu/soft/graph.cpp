// SPDX-License-Identifier: Apache-2.0
//
// Capturing what is given to streams, and running it again.
//
// A graph's nodes are in the order in which they were given, so what a node comes after stands
// before it. With a seed, nodes that nothing orders run in another order each time; a node that
// waits for a word never keeps those from running that do not come after it.
#include <algorithm>

#include "kernels/emu/soft/machine.h"

namespace soft
{
int add_node(const stream_ptr &s, work &&what)
{
    capture &c = *s->recording;
    if (c.broken)
        return KVQ_GPU_CAPTURE_INVALIDATED;
    c.nodes.push_back({std::move(what), s->frontier});
    s->frontier = {(int)c.nodes.size() - 1};
    return KVQ_GPU_OK;
}

bool unsafe_now()
{
    bool unsafe = false;
    guard g(m.order);
    for (const auto &one : m.streams) {
        const capture_ptr &c = one.second->recording;
        if (!c || c->mode == KVQ_GPU_CAPTURE_RELAXED ||
            (c->mode == 1 && c->thread != std::this_thread::get_id()))
            continue;
        c->broken = unsafe = true;
    }
    return unsafe;
}

int capture_begin(kvq_gpu_stream *handle, int mode)
{
    stream_ptr s;
    const int result = find_stream(handle, &s);
    if (result)
        return result;
    if (mode < 0 || mode > KVQ_GPU_CAPTURE_RELAXED)
        return KVQ_GPU_INVALID_VALUE;
    guard g(m.order);
    if (s->number == 0) // the default stream
        return KVQ_GPU_CAPTURE_UNSUPPORTED;
    if (s->recording)
        return KVQ_GPU_INVALID_VALUE;
    s->recording = std::make_shared<capture>();
    s->recording->origin = s.get();
    s->recording->mode = mode;
    s->recording->thread = std::this_thread::get_id();
    s->recording->members.push_back(s);
    s->frontier.clear();
    return KVQ_GPU_OK;
}

int stream_capturing(kvq_gpu_stream *handle, int *status)
{
    stream_ptr s;
    const int result = find_stream(handle, &s);
    if (result)
        return result;
    guard g(m.order);
    *status = !s->recording          ? KVQ_GPU_CAPTURE_NONE
              : s->recording->broken ? KVQ_GPU_CAPTURE_BROKEN
                                     : KVQ_GPU_CAPTURE_ACTIVE;
    return KVQ_GPU_OK;
}

// Whether all that was forked has come back to the stream where the capture began.
static bool joined(const capture &c, const stream &origin)
{
    std::vector<char> before(c.nodes.size());
    for (const int n : origin.frontier)
        before[n] = 1;
    for (size_t i = c.nodes.size(); i-- > 0;)
        if (before[i])
            for (const int n : c.nodes[i].after)
                before[n] = 1;
    return std::find(before.begin(), before.end(), 0) == before.end();
}

int capture_end(kvq_gpu_stream *handle, kvq_gpu_graph **result)
{
    stream_ptr s;
    int ended = find_stream(handle, &s);
    *result = NULL;
    if (ended)
        return ended;
    guard g(m.order);
    const capture_ptr c = s->recording;
    if (!c || c->origin != s.get())
        return c ? KVQ_GPU_CAPTURE_UNMATCHED : KVQ_GPU_INVALID_VALUE;
    if (c->broken)
        ended = KVQ_GPU_CAPTURE_INVALIDATED;
    else if (!joined(*c, *s))
        ended = KVQ_GPU_CAPTURE_UNJOINED;
    const std::vector<stream_ptr> members = std::move(c->members);
    for (const stream_ptr &one : members) {
        one->recording = NULL;
        one->frontier.clear();
    }
    if (ended)
        return ended;
    graph_ptr made = std::make_shared<graph>();
    made->nodes = std::make_shared<const node_list>(std::move(c->nodes));
    m.graphs[made.get()] = made;
    *result = (kvq_gpu_graph *)made.get();
    return KVQ_GPU_OK;
}

int graph_ready(kvq_gpu_exec **exec, kvq_gpu_graph *from, unsigned long long)
{
    guard g(m.order);
    const auto found = m.graphs.find(from);
    if (found == m.graphs.end())
        return KVQ_GPU_INVALID_HANDLE;
    graph_ptr made = std::make_shared<graph>();
    made->nodes = found->second->nodes;
    made->last = {NULL, 0, NULL};
    m.execs[made.get()] = made;
    *exec = (kvq_gpu_exec *)made.get();
    return KVQ_GPU_OK;
}

int graph_destroy(kvq_gpu_graph *from)
{
    guard g(m.order);
    return m.graphs.erase(from) ? KVQ_GPU_OK : KVQ_GPU_INVALID_HANDLE;
}

int exec_destroy(kvq_gpu_exec *exec)
{
    guard g(m.order);
    return m.execs.erase(exec) ? KVQ_GPU_OK : KVQ_GPU_INVALID_HANDLE;
}

// ---- Running one ----

// Which nodes can run, and which come after which.
struct progress {
    std::vector<int> missing, ready;
    std::vector<std::vector<int>> next;
};

static progress start(const node_list &nodes)
{
    progress p;
    p.missing.resize(nodes.size());
    p.next.resize(nodes.size());
    for (size_t i = 0; i < nodes.size(); i++) {
        p.missing[i] = (int)nodes[i].after.size();
        for (const int n : nodes[i].after)
            p.next[n].push_back((int)i);
        if (p.missing[i] == 0)
            p.ready.push_back((int)i);
    }
    return p;
}

static look look_at_all(const work &w)
{
    for (const waiting &one : w.first)
        if (const look now = look_at(one); now != DONE)
            return now;
    return DONE;
}

// The place in p.ready of one that waits for nothing, or -1 after a while.
static int choose(const node_list &nodes, const progress &p, uint64_t draw, unsigned *turn)
{
    const size_t n = p.ready.size(), first = m.seed ? draw % n : 0;
    for (size_t i = 0; i < n; i++) {
        const size_t at = (first + i) % n;
        if (look_at_all(nodes[p.ready[at]].what) != WAITING)
            return (int)at;
    }
    doze(nodes[p.ready[first]].what.first[0], turn);
    return -1;
}

static int run_node(const work &w, const run_at &at)
{
    for (const waiting &one : w.first) {
        if (look_at(one) != GONE)
            continue;
        fault(KVQ_GPU_ILLEGAL_ADDRESS, "a graph waits for a word in memory that is gone");
        return KVQ_GPU_ILLEGAL_ADDRESS;
    }
    return w.run ? w.run(at) : KVQ_GPU_OK;
}

int run_graph(const node_list &nodes, const run_at &at)
{
    progress p = start(nodes);
    uint64_t draw = mix(at.draw, 3);
    for (unsigned turn = 0; !p.ready.empty();) {
        if (const int result = broken())
            return result;
        const int chosen = choose(nodes, p, draw, &turn);
        if (chosen < 0)
            continue;
        const int number = p.ready[chosen];
        p.ready.erase(p.ready.begin() + chosen);
        draw = mix(draw, number);
        delay(draw);
        if (const int result = run_node(nodes[number].what, {at.device, draw}))
            return result;
        for (const int n : p.next[number])
            if (--p.missing[n] == 0)
                p.ready.push_back(n);
        turn = 0;
    }
    return KVQ_GPU_OK;
}

// A graph within a graph: its nodes, after all that came before.
static int add_graph(const stream_ptr &s, const node_list &nodes)
{
    capture &c = *s->recording;
    const int base = (int)c.nodes.size();
    std::vector<char> last(nodes.size(), 1);
    if (c.broken)
        return KVQ_GPU_CAPTURE_INVALIDATED;
    for (const node &one : nodes) {
        node copy = one;
        for (int &n : copy.after) {
            last[n] = 0;
            n += base;
        }
        if (copy.after.empty())
            copy.after = s->frontier;
        c.nodes.push_back(std::move(copy));
    }
    if (!nodes.empty())
        s->frontier.clear();
    for (size_t i = 0; i < nodes.size(); i++)
        if (last[i])
            s->frontier.push_back(base + (int)i);
    return KVQ_GPU_OK;
}

// A graph runs once at a time: the next launch waits for the one before.
int graph_launch(kvq_gpu_exec *exec, kvq_gpu_stream *handle)
{
    stream_ptr s;
    graph_ptr e;
    work w;
    uint64_t number = 0;
    int result = find_stream(handle, &s);
    if (result || m.in_steps)
        return result ? result : KVQ_GPU_NOT_SUPPORTED;
    {
        guard g(m.order);
        const auto found = m.execs.find(exec);
        if (found == m.execs.end())
            return KVQ_GPU_INVALID_HANDLE;
        e = found->second;
        if (s->recording)
            return add_graph(s, *e->nodes);
        if (e->last.at)
            w.first.push_back(e->last);
    }
    const std::shared_ptr<const node_list> nodes = e->nodes;
    w.run = [nodes](const run_at &at) { return run_graph(*nodes, at); };
    result = give(s, std::move(w), &number);
    if (!result) {
        guard g(m.order);
        e->last = until(s, number);
    }
    return result;
}
} // namespace soft

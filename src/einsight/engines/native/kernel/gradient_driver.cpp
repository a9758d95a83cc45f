// Cuts the gradients into parts for threads. As in driver.cpp, the cuts depend on the shape of one item alone.
#include <vector>

#include "driver.h"
#include "tasks.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace {

GradientSpace take_space(Arena &arena, const Request &a, const Gradient &g, int64_t rows) {
  int64_t query = round_up(a.d, kMaxWidth), value = round_up(a.e, kMaxWidth), widest = most(query, value);
  GradientSpace s{};
  s.query = arena.take(rows * query);
  s.query_pairs = arena.take(a.pairs ? (rows + kStrip) * query : 0);
  s.output_grad = arena.take(rows * value);
  s.query_grad = arena.take(rows * query);
  s.keys = arena.take(kTile * a.depth());
  s.key_rows = arena.take(kTile * query);
  s.values = arena.take(kTile * a.e);
  s.key_grad = arena.take(kTile * query);
  s.value_grad = arena.take(kTile * value);
  s.weights = arena.take(kBlock * (kTile + 16));
  s.scores_grad = arena.take(kBlock * (kTile + 16));
  s.chain = arena.take(a.softcap > 0 ? kBlock * (kTile + 16) : 0);
  s.clean = arena.take(most(kTile * kPanel, widest * kPanel));
  for (auto &row : s.row) row = arena.take(rows);
  s.unsafe = reinterpret_cast<uint8_t *>(arena.take((rows + 3) / 4));
  return s;
}

// Parts of one key head are few and large where there are heads enough for the threads.
int64_t rows_of_a_part(const Request &a) {
  int64_t most_rows = most(kPart / 3, least(kPart, a.g * a.rows() / 8)), parts = (a.rows() + most_rows - 1) / most_rows;
  int64_t rows = (a.rows() + parts - 1) / parts, heads = a.heads_per_key();
  // Whole queries, so that no two parts add to the same row of a bias.
  return least(round_up(rows, heads), heads < kPart ? kPart / heads * heads : kPart);
}

}  // namespace

bool gradients(const Request &a, const Gradient &g, const Kernel &kernel, int threads, bool (*interrupted)()) {
  if (a.b * a.h * a.i * a.j == 0) return true;
  int64_t rows = rows_of_a_part(a), parts = (a.rows() + rows - 1) / rows, key_heads = a.b * a.g;
  int64_t tiles = (a.j + kTile - 1) / kTile, heads = a.heads_per_key();
  std::vector<int32_t> turns(key_heads * tiles), before(key_heads * parts * tiles);
  // Parts that add to the same rows of a bias' gradient do so one after the other, in the order of their key heads.
  bool items = g.bias_grad && g.bias_grad_stride[0] == 0, groups = g.bias_grad && g.bias_grad_stride[1] == 0;
  std::vector<std::atomic<int64_t>> biased((items ? 1 : a.b) * (groups ? 1 : a.g) * parts);
  std::vector<Part> todo;
  for (int64_t key_head = 0; key_head < key_heads; key_head++) {
    std::vector<int32_t> seen(tiles);
    // The last rows first: under a causal mask they are the long ones, and the loop should end with short tasks.
    for (int64_t n = parts - 1; n >= 0; n--) {
      Part part{key_head / a.g, key_head % a.g, n * rows, least((n + 1) * rows, a.rows()), tiles, 0,
                turns.data() + key_head * tiles, before.data() + (key_head * parts + n) * tiles};
      for (int64_t row = part.row_begin; row < part.row_end; row++) {
        int64_t query = row / heads, head = part.group * heads + row % heads;
        int64_t lo = a.first(part.batch, head, query), hi = a.last(part.batch, head, query);
        if (lo >= hi) continue;
        part.tile_begin = least(part.tile_begin, lo / kTile);
        part.tile_end = most(part.tile_end, (hi + kTile - 1) / kTile);
      }
      for (int64_t t = part.tile_begin; t < part.tile_end; t++)
        before[(key_head * parts + n) * tiles + t] = seen[t]++;
      todo.push_back(part);
    }
  }

  std::vector<GradientSpace> space(threads);
  Memory memory;
  for (Arena arena{nullptr};; arena = {memory.get()}) {
    for (auto &s : space) s = take_space(arena, a, g, rows);
    if (memory) break;
    memory = allocate(arena.used);
  }
  Loop loop(threads, static_cast<int64_t>(todo.size()), interrupted);
  return loop.run([&](int thread, int64_t n) {
    const Part &part = todo[n];
    int64_t slice = (items ? 0 : part.batch) * (groups ? 1 : a.g) + (groups ? 0 : part.group);
    int64_t turn = (items ? part.batch * (groups ? a.g : 1) : 0) + (groups ? part.group : 0);
    auto &done = biased[slice * parts + part.row_begin / rows];
    while (g.bias_grad && done < turn) std::this_thread::yield();
    if (!loop.cancelled()) {
      kernel.differentiate(a, g, part, space[thread]);
      done++;
      return;
    }
    done++;
    for (int64_t t = part.tile_begin; t < part.tile_end; t++)  // who waits for this part shall not wait for ever
      __atomic_add_fetch(part.turns + t, 1, __ATOMIC_RELEASE);
  });
}

}  // namespace EINSIGHT_PRECISION
}  // namespace einsight

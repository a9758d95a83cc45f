// Cuts a request into tasks for threads. The cuts depend on the problem's shape and never on the number of
// threads, nor on the batch: that is why results are the same bits for any of them.
#include "driver.h"

#include "tasks.h"

#include <map>
#include <mutex>
#include <vector>


namespace einsight {
inline namespace EINSIGHT_PRECISION {
namespace {

constexpr int64_t kChunk = 1024;             // keys in one task where there is a single block of rows
constexpr int64_t kShared = 48 << 20;        // bytes of packed keys and values held at once
constexpr int64_t kSmall = 1 << 18;          // multiply-adds below which a second thread costs more than it brings

// The value dimension padded to whole vectors; enough for every width.
int64_t padded_value(const Request &a) { return round_up(a.e, kMaxWidth); }

Rows take_rows(Arena &arena, const Request &a, int64_t rows) {
  Rows s{};
  s.reference = arena.take(a.room(rows));
  s.largest = arena.take(a.room(rows));
  s.sum = arena.take(rows * kMaxWidth);
  s.moment = arena.take(rows * kMaxWidth);
  s.output = arena.take(rows * padded_value(a));
  return s;
}

// The exponentials of whole rows, where readouts need them after the softmax is known.
void take_weights(Arena &arena, const Request &a, int64_t rows, Rows &s) {
  if (!a.keeps_weights()) return;
  s.weights = arena.take(a.room(rows) * (round_up(a.j, kPanel) + 16));
  s.tile_reference = arena.take(a.room(rows) * (a.step_of(a.j - 1) + 1));
  s.rows_stride = a.room(rows);
}

Workspace take_workspace(Arena &arena, const Request &a, int64_t rows) {
  Workspace w{};
  w.query = arena.take(a.room(rows) * round_up(a.d, kMaxWidth));
  w.tile_max = arena.take(round_up(rows, kGroup) * kMaxWidth);  // read by whole groups
  if (!a.keeps_weights()) w.scores = arena.take(a.tiles ? 2 * kStrip * kPanel : rows * (kTile + 16));
  if (a.is_dense() || a.pairs) w.values = arena.take(kTile * kPanel);
  if (a.pairs) w.pairs = arena.take(a.tiles ? 2 * kStrip * kPanel / 2 : kGroup * kPairStride);
  if (a.tiles) w.products = arena.take(kStrip * padded_value(a));
  int64_t groups = 0;
  for (int64_t n = 0; n < a.ask_count; n++)
    if (a.asks[n].kind == Kind::mass || a.asks[n].kind == Kind::mass_of_ids) groups = most(groups, a.asks[n].number);
  w.mass = arena.take(kGroup * round_up(groups, kMaxWidth) * 2);  // room for doubles
  return w;
}

// Room for what a block of rows adds to the results that are sums over blocks.
void take_sums(Arena &arena, const Request &a, int64_t rows, std::vector<Sums> &sums) {
  sums.resize(a.ask_count);
  for (int64_t n = 0; n < a.ask_count; n++) {
    if (!a.asks[n].adds()) continue;
    int64_t queries = rows / a.heads_per_key() + 2;
    sums[n].lines = a.asks[n].kind == Kind::pool ? queries / a.asks[n].number + 2 : 1;
    sums[n].stride = round_up(a.j, kPanel);
    sums[n].data = arena.take(a.heads_per_key() * sums[n].lines * sums[n].stride);
  }
}

Packed take_tiles(Arena &arena, const Request &a, int64_t tiles) {
  Packed p{};
  p.keys = arena.take(tiles * kTile * a.depth());
  p.values = arena.take(a.value ? tiles * a.tile_steps() * padded_value(a) : 0);
  return p;
}

// Calls use(from, to, n) for each row of n columns that a block adds to a result.
template <class F> void each_line(const Request &a, int64_t key_head, const Ask &ask, const Sums &sums, F use) {
  int64_t heads = a.heads_per_key(), cell = ask.cell(), columns = (a.j + cell - 1) / cell;
  int64_t lines = ask.kind == Kind::pool ? (a.i + cell - 1) / cell : 1;
  for (int64_t head = 0; head < heads; head++)
    for (int64_t line = sums.line; line < sums.line_end; line++)
      use(sums.of(head, line), ask.result + ((key_head * heads + head) * lines + line) * columns + sums.first,
          sums.last - sums.first);
}

void add_sums(const Request &a, int64_t key_head, const std::vector<Sums> &sums) {
  for (int64_t n = 0; n < a.ask_count; n++)
    if (a.asks[n].adds())
      each_line(a, key_head, a.asks[n], sums[n], [](const Real *from, Real *to, int64_t count) {
        for (int64_t k = 0; k < count; k++) to[k] += from[k];
      });
}

// Adds the sums of blocks in the order of the blocks, whichever is done first.
class InOrder {
 public:
  InOrder(const Request &a) : a_(a), next_(a.b * a.g) {}

  void add(int64_t key_head, int64_t block, const std::vector<Sums> &sums) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (block != next_[key_head]) {
      keep(key_head, early_[{key_head, block}], sums);
      return;
    }
    add_sums(a_, key_head, sums);
    while (true) {
      auto next = early_.find({key_head, ++next_[key_head]});
      if (next == early_.end()) return;
      add_sums(a_, key_head, next->second.sums);
      early_.erase(next);
    }
  }

 private:
  struct Early { std::vector<std::vector<Real>> copies; std::vector<Sums> sums; };

  void keep(int64_t key_head, Early &early, const std::vector<Sums> &sums) {
    early.copies.resize(sums.size()), early.sums = sums;
    for (size_t n = 0; n < sums.size(); n++) {
      if (!a_.asks[n].adds()) continue;
      each_line(a_, key_head, a_.asks[n], sums[n], [&](const Real *from, Real *, int64_t count) {
        early.copies[n].insert(early.copies[n].end(), from, from + count);
      });
      Sums &kept = early.sums[n];
      kept.data = early.copies[n].data(), kept.lines = kept.line_end - kept.line, kept.stride = kept.last - kept.first;
    }
  }

  const Request &a_;
  std::mutex mutex_;
  std::vector<int64_t> next_;
  std::map<std::pair<int64_t, int64_t>, Early> early_;
};

// Several blocks of rows read the same keys: a task is a block, and packed keys are shared.
bool by_blocks(const Request &a, const Kernel &kernel, int threads, bool (*interrupted)()) {
  int64_t key_heads = a.b * a.g, tiles = (a.j + kTile - 1) / kTile;
  int64_t blocks = (a.rows() + kBlock - 1) / kBlock;
  int64_t block = round_up((a.rows() + blocks - 1) / blocks, a.group());
  blocks = (a.rows() + block - 1) / block;
  int64_t slot_bytes = tiles * (kTile * a.depth() + a.tile_steps() * padded_value(a)) * sizeof(Real);
  // One slot more than threads, so that the next head can begin while the last blocks of this one finish.
  int64_t slots = most(1, least(least(kShared / slot_bytes, threads + 1), key_heads));

  std::vector<Packed> packed(slots);
  std::vector<Workspace> work(threads);
  std::vector<std::vector<Sums>> sums(threads);
  std::vector<Rows> rows(threads);
  Memory memory;
  for (Arena arena{nullptr};; arena = {memory.get()}) {
    for (auto &p : packed) p = take_tiles(arena, a, tiles);
    for (int n = 0; n < threads; n++) {
      work[n] = take_workspace(arena, a, block);
      take_sums(arena, a, block, sums[n]);
      work[n].sums = sums[n].data();
      rows[n] = take_rows(arena, a, block);
      take_weights(arena, a, block, rows[n]);
    }
    if (memory) break;
    memory = allocate(arena.used);
  }

  std::vector<int32_t> state(key_heads * tiles);
  std::vector<uint8_t> unsafe(key_heads * tiles);
  std::vector<std::atomic<int64_t>> finished(key_heads);
  InOrder in_order(a);
  bool adds = false;
  for (int64_t n = 0; n < a.ask_count; n++) adds = adds || a.asks[n].adds();
  Loop loop(threads, key_heads * blocks, interrupted);
  return loop.run([&](int thread, int64_t n) {
    int64_t key_head = n / blocks, order = n % blocks;
    // The last rows first: under a causal mask they are the long ones, and the loop should end with short tasks.
    int64_t begin = (blocks - 1 - order) * block;
    Task task{key_head / a.g, key_head % a.g, begin, least(begin + block, a.rows()), 0, a.j};
    while (key_head >= slots && finished[key_head - slots] != blocks) std::this_thread::yield();
    if (!loop.cancelled()) {
      Packed tiles_of_head = packed[key_head % slots];
      tiles_of_head.state = state.data() + key_head * tiles;
      tiles_of_head.unsafe = unsafe.data() + key_head * tiles;
      Rows r = rows[thread];
      kernel.attend(a, task, tiles_of_head, work[thread], r);
      kernel.finish(a, task, work[thread], r);
      if (adds) in_order.add(key_head, order, sums[thread]);
    }
    finished[key_head]++;
  });
}

// One block of rows: decoding, and short sequences. A task is a chunk of keys, packed for it alone.
bool by_chunks(const Request &a, const Kernel &kernel, int threads, bool (*interrupted)()) {
  int64_t key_heads = a.b * a.g, rows = a.rows(), chunks = most(1, (a.j + kChunk - 1) / kChunk);
  Arena one{nullptr};
  Rows measure = take_rows(one, a, rows);
  one.used *= chunks;
  take_weights(one, a, rows, measure);
  int64_t wave = most(1, least(key_heads, kShared / 4 / one.used));  // key heads under way together

  std::vector<Packed> packed(threads);
  std::vector<Workspace> work(threads);
  std::vector<std::vector<Sums>> sums(threads);
  std::vector<Rows> parts(wave * chunks);
  std::vector<uint8_t> unsafe(threads);
  Memory memory;
  for (Arena arena{nullptr};; arena = {memory.get()}) {
    for (int n = 0; n < threads; n++) {
      packed[n] = take_tiles(arena, a, 1);
      packed[n].unsafe = &unsafe[n];
      work[n] = take_workspace(arena, a, rows);
      take_sums(arena, a, rows, sums[n]);
      work[n].sums = sums[n].data();
    }
    for (int64_t n = 0; n < wave; n++) {
      Rows kept{};
      take_weights(arena, a, rows, kept);
      for (int64_t c = 0; c < chunks; c++) {
        Rows &part = parts[n * chunks + c] = take_rows(arena, a, rows);
        part.weights = kept.weights, part.tile_reference = kept.tile_reference;
        part.weights_stride = round_up(a.j, kPanel) + 16, part.rows_stride = a.room(rows);
      }
    }
    if (memory) break;
    memory = allocate(arena.used);
  }

  for (int64_t begin = 0; begin < key_heads; begin += wave) {
    int64_t heads = least(wave, key_heads - begin);
    auto task_of = [&](int64_t key_head, int64_t key_begin, int64_t key_end) {
      return Task{key_head / a.g, key_head % a.g, 0, rows, key_begin, key_end};
    };
    auto complete = [&](int thread, int64_t n) {
      Task task = task_of(begin + n, 0, a.j);
      for (int64_t c = 1; c < chunks; c++) kernel.merge(a, parts[n * chunks], parts[n * chunks + c]);
      kernel.finish(a, task, work[thread], parts[n * chunks]);
      add_sums(a, begin + n, sums[thread]);
    };
    Loop attend(threads, heads * chunks, interrupted);
    if (!attend.run([&](int thread, int64_t n) {
          if (attend.cancelled()) return;
          int64_t key_begin = n % chunks * kChunk;
          Task task = task_of(begin + n / chunks, key_begin, least(key_begin + kChunk, a.j));
          kernel.attend(a, task, packed[thread], work[thread], parts[n]);
          if (chunks == 1) complete(thread, n);
        }))
      return false;
    if (chunks > 1) Loop(threads, heads, interrupted).run(complete);
  }
  return true;
}

}  // namespace

bool attention(const Request &a, const Kernel &kernel, int threads, bool (*interrupted)()) {
  if (a.b * a.h * a.i == 0) return true;
  if (a.b * a.h * a.i * most(a.j, 1) * (a.d + a.e) < kSmall) threads = 1;
  return a.rows() > kBlock ? by_blocks(a, kernel, threads, interrupted) : by_chunks(a, kernel, threads, interrupted);
}

}  // namespace EINSIGHT_PRECISION
}  // namespace einsight

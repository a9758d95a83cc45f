// What one call asks for, and what the parts of the kernel hand each other.
// Plain structs: they are shared by code compiled for different instruction sets.
#pragma once
#include <cstdint>

namespace einsight {
inline namespace EINSIGHT_PRECISION {

typedef EINSIGHT_REAL Real;  // what is computed in: float, or double for double inputs
enum class Dtype : int { float32, bfloat16, float16, float64 };

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr int kStrip = 16;   // query rows, or steps, in one tile of a product of tiles

// Which keys a query may see: those that everything given here allows.
struct Rule {
  const int64_t *lo, *hi;           // lo <= j < hi; null: as far ahead of the query's row; beyond: 0 and `end`
  int64_t lo_stride[3], hi_stride[3], lo_ahead, hi_ahead, end;
  const uint8_t *seen;              // bytes that broadcast to [b, h, i, j], or null
  int64_t seen_stride[4];
  bool shows;                       // whether a byte that is not 0 shows the key or hides it
  const int64_t *query_ids, *key_ids;  // the same id, or null; key ids of one item lie side by side
  int64_t query_ids_stride[2], key_ids_stride[2];

  int64_t inside(int64_t bound) const { return least(most(bound, 0), end); }  // far ones don't fit into 32 bits
  bool is_interval() const { return !seen && !key_ids; }
  int64_t first(int64_t batch, int64_t head, int64_t query) const {
    return inside(lo ? lo[batch * lo_stride[0] + head * lo_stride[1] + query * lo_stride[2]] : query + lo_ahead);
  }
  int64_t last(int64_t batch, int64_t head, int64_t query) const {  // and one
    return inside(hi ? hi[batch * hi_stride[0] + head * hi_stride[1] + query * hi_stride[2]] : query + hi_ahead);
  }
};

// A readout of finished weights.
enum class Kind : int { received, seen, pool, rows, top, share, mass_of_ids, mass, diagonal, distance };

struct Ask {
  Kind kind;
  int64_t number;                   // top: k; mass: groups; diagonal: shift; pool: queries and keys of a block
  int64_t count;                    // the queries it is about
  const int64_t *slot;              // [i]: the row of the result that query i fills, -1 for none; null: row i
  Rule rule;                        // share
  const int64_t *ids;               // mass: [j] groups, -1 for none
  const Real *matrix;              // mass: [j][number rounded up to 16]
  int64_t item_stride;              // between the ids, or the matrices, of two items
  Real *result;                    // zeros on entry where pieces are added up
  int64_t *indices;                 // top

  int64_t slot_of(int64_t query) const { return slot ? slot[query] : query; }
  // Sums over queries have one line, or with pool a line for each block of queries.
  bool adds() const { return kind == Kind::received || kind == Kind::seen || kind == Kind::pool; }
  int64_t line_of(int64_t query) const { return kind == Kind::pool ? query / number : 0; }
  int64_t cell() const { return kind == Kind::pool ? number : 1; }  // keys that one column is about
};

// Letters as everywhere: b batch, h query heads, g key heads, i query, j key, d head_dim, e value_dim.
struct Request : Rule {
  int64_t b, h, g, i, j, d, e;
  Dtype dtype;
  const void *query, *key, *value;  // value is null where only readouts are asked
  int64_t query_stride[4], key_stride[4], value_stride[4];
  bool pairs;                       // whether products take two bfloat16 numbers at once
  bool tiles;                       // whether they are products of tiles; of pairs, then
  Real scale, softcap;             // softcap 0: none
  const Real *sink, *slopes;       // [h] or null
  const Real *bias;                // broadcasts to [b, h, i, j], or null; -inf hides a key
  int64_t bias_stride[4];
  const int64_t *positions;         // p, read for alibi, diagonal and distance only
  int64_t positions_stride[2];
  void *output;                     // [b, i, h, e] in the inputs' dtype: a token's heads lie side by side
  Real *lse, *max_score, *entropy; // [b, h, i]
  Real *lse_rest;                  // [b, h, i]: what rounding took from lse, for the gradients
  Real *scores;                    // [b, h, i, j]
  const Ask *asks;
  int64_t ask_count;

  int64_t depth() const { return tiles ? round_up(d / 2, kStrip) : pairs ? d / 2 : d; }  // steps of a score's product
  int64_t tile_steps() const;                                    // steps of a tile's product with values
  // Steps in one chain of a score's product. A long chain of additions loses bits; where the products cost nothing
  // (decoding), chains are kept short.
  int64_t slab() const;
  int64_t value_chain() const;                                  // and of its product with values
  int64_t heads_per_key() const { return h / g; }
  int64_t rows() const { return h / g * i; }  // query rows that read one key head
  int64_t group() const;            // query rows whose products with a panel are one step
  int64_t step() const;             // keys between two updates of the running maximum
  int64_t step_of(int64_t key) const;
  int64_t room(int64_t rows) const { return tiles ? round_up(rows, kStrip) : rows; }  // rows that products touch
  bool keeps_weights() const { return ask_count > 0; }

  // Scores are stored without the scale, which then costs no step of its own: it is part of the factor between
  // differences of scores and exponents of 2. Only its sign goes into the query. Where softcap or a bias ask for a
  // step anyway, it applies the scale as well; so does the query where a scale is too small to divide by.
  bool adjusted() const { return softcap > 0 || slopes || bias; }
  // Whether single keys may be hidden between those that a query sees.
  bool is_dense() const { return bias || !is_interval(); }
  Real query_factor() const { return adjusted() ? 1.f : unit() == 1.f ? scale : scale < 0 ? -1.f : 1.f; }
  Real unit() const {  // a score is a stored score times this
    Real size = scale < 0 ? -scale : scale;
    return adjusted() || size < 1e-9f ? 1.f : size;
  }
};

// What the gradients are made from, beside the forward's request, and where they go. Null: not given, or not asked.
struct Gradient {
  const void *output, *output_grad;                 // [b, h, i, e] in the inputs' dtype
  int64_t output_stride[4], output_grad_stride[4];
  const Real *lse, *lse_rest, *max_score, *entropy; // [b, h, i], the forward's results; entropy with its gradient
  const Real *lse_grad, *max_score_grad, *entropy_grad;
  const Ask *asks;                                  // the forward's readouts: `result` their gradient, null: none
  int64_t ask_count;
  Real *query_grad, *key_grad, *value_grad;        // [b, h, i, d], [b, g, j, d], [b, g, j, e]; zeros on entry
  Real *slopes_grad;                               // [b, h, i]: each query's part of its head's
  Real *bias_grad;                                 // [b or 1, h or 1, i, j]; zeros on entry
  int64_t bias_grad_stride[2];                      // 0 where all items, or all heads, add to the same
  Real *sink_grad;                                 // [b, h, i]: each query's part

  bool is_rounded;                                 // whether the output is: then it tells a row's mean of g no better
  // Sums over the keys of a row, as those of slopes and biases are, leave of the mean its error.
  bool looks_first() const { return ask_count > 0 || max_score_grad || (is_rounded && (slopes_grad || bias_grad)); }
};

constexpr int kGroup = 6;    // query rows in one register tile
constexpr int kPanel = 64;   // keys in one packed panel
constexpr int kBlock = 96;   // query rows that share a pass over the keys
constexpr int kTile = 256;   // keys that are packed together
constexpr int kMaxWidth = 16;
constexpr int kPairStride = kTile / 2 + 16;  // of weights two at a time

inline int64_t Request::slab() const { return rows() <= kGroup ? 16 : 64; }
inline int64_t Request::value_chain() const { return rows() <= kBlock ? 64 : kTile; }
inline int64_t Request::step() const { return tiles ? kPanel : kTile; }
inline int64_t Request::step_of(int64_t key) const { return tiles ? key / kPanel : key / kTile; }
inline int64_t Request::group() const { return tiles ? kStrip : kGroup; }
inline int64_t Request::tile_steps() const { return pairs ? kTile / 2 : kTile; }

// The packed keys and values of one key head. With `state`, tiles are packed by whichever thread
// needs them first and shared; without, the buffers hold one tile and belong to one thread.
struct Packed {
  Real *keys;           // [panel][depth][64]
  Real *values;         // [tile][value panel][steps][panel width]
  int32_t *state;        // per tile: 0 raw, 1 being packed, 2 packed
  uint8_t *unsafe;       // per tile: some value is NaN or infinite
};

// The running softmax of a block of rows. Scores are as stored: see Request::unit.
struct Rows {
  int64_t count;
  Real *reference;      // [rows] what exponents are relative to: the largest score so far, or the sink
  Real *largest;        // [rows] the largest score so far, without the sink
  Real *sum;            // [rows][16] lanes of the sum of exp2(x), x = (score - reference) * unit * log2(e)
  Real *moment;         // [rows][16] lanes of the sum of exp2(x) * x
  Real *output;         // [rows][padded e]
  Real *weights;        // [rows][weights_stride] exp2(x) by the reference of its tile, in the end weights; first column is key `origin`
  int64_t weights_stride, origin;
  Real *tile_reference; // [step][rows_stride] the reference that `weights` was written with
  int64_t rows_stride;
};

// What one block of rows adds to one readout: columns [first, last) of lines [line, line_end) of each head.
struct Sums {
  Real *data;           // [head][line][stride]
  int64_t lines, stride; // how many lines there is room for
  int64_t line, line_end, first, last;

  Real *of(int64_t head, int64_t n) const { return data + (head * lines + n - line) * stride; }
};

// A thread's own memory.
struct Workspace {
  Real *query;          // [rows][padded d], scaled
  Real *tile_max;       // [rows][16]
  Real *scores;         // [rows][kTile + 16], or with tiles [2][kStrip][kPanel], where weights need not be kept
  Real *values;         // [kTile][columns of a value panel], where single keys may be hidden
  Real *pairs;          // [kGroup][kPairStride] weights of a tile, two at a time; with tiles [2 kStrip][kPanel / 2]
  Real *products;       // [kStrip][padded e] with tiles, weights of a panel times values
  Real *mass;           // [kGroup][padded groups], where asked
  Sums *sums;            // [asks], of those that add up
};

struct Task {
  int64_t batch, group;           // which key head
  int64_t row_begin, row_end;     // rows are query-major: row = query * heads_per_key + head in group
  int64_t key_begin, key_end;     // multiples of kTile, but for the end
};

constexpr int kPart = 768;  // query rows of one task of the gradients, at most

// Query rows of one key head whose gradients one thread computes. Their share of the gradients of a tile of keys is
// added when `turns[tile]` says that the parts before have done so: `before[tile]` counts those.
struct Part {
  int64_t batch, group, row_begin, row_end;
  int64_t tile_begin, tile_end;  // the tiles of keys that some row sees
  int32_t *turns;
  const int32_t *before;
};

// A thread's memory for the gradients.
struct GradientSpace {
  Real *query, *output_grad, *query_grad;   // [kPart][padded d or e]
  Real *query_pairs;                        // [kPart][padded d], where scores are made of pairs
  Real *keys, *key_rows, *values;           // a tile: panels [d][64], rows in panels [256][columns], panels [e][64]
  Real *key_grad, *value_grad;              // a tile [256][padded d or e]
  Real *weights, *scores_grad, *chain;      // [kBlock][kTile + 16]; chain: derivative of the softcap
  Real *clean;                              // a copy of rows or a panel without what may not be seen
  Real *row[7];                             // [kPart] each
  uint8_t *unsafe;                           // [kPart]: the row of query or output_grad is NaN or infinite somewhere
};

// What an instruction set offers. One instance per level; see block.cpp.
struct Kernel {
  const char *name;
  int width;  // floats in a vector
  bool has_pairs, has_tiles;
  void (*attend)(const Request &, const Task &, Packed &, Workspace &, Rows &);
  void (*merge)(const Request &, Rows &into, const Rows &from);
  // Output and readouts of finished rows. What is added up over blocks is left in the workspace.
  void (*finish)(const Request &, const Task &, Workspace &, Rows &);
  void (*differentiate)(const Request &, const Gradient &, const Part &, GradientSpace &);
  double (*peak)(int64_t steps);  // multiply-adds and nothing else: the ceiling benchmarks compare with
};

}  // namespace EINSIGHT_PRECISION
}  // namespace einsight

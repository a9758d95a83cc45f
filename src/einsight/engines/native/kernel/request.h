// What one call asks for, and what the parts of the kernel hand each other.
// Plain structs: they are shared by code compiled for different instruction sets.
#pragma once
#include <cstdint>

namespace einsight {

enum class Dtype : int { float32, bfloat16, float16 };

// Letters as everywhere: b batch, h query heads, g key heads, i query, j key, d head_dim, e value_dim.
struct Request {
  int64_t b, h, g, i, j, d, e;
  Dtype dtype;
  const void *query, *key, *value;  // value is null where only readouts are asked
  int64_t query_stride[4], key_stride[4], value_stride[4];
  float scale, softcap;             // softcap 0: none
  const float *sink, *slopes;       // [h] or null
  const int64_t *lo, *hi;           // keys visible to a query: lo <= j < hi
  int64_t lo_stride[3], hi_stride[3];
  const int64_t *positions;         // p, read for alibi only
  int64_t positions_stride[2];
  const uint8_t *received_from;     // [i]: the queries that count, null: all of them
  void *output;                     // [b, h, i, e] in the inputs' dtype
  float *lse, *max_score, *entropy; // [b, h, i]
  float *lse_rest;                  // [b, h, i]: what rounding took from lse, for the gradients
  float *received;                  // [b, h, j], zeros on entry
  float *weights, *scores;          // [b, h, i, j]

  int64_t heads_per_key() const { return h / g; }
  int64_t rows() const { return h / g * i; }  // query rows that read one key head
  bool keeps_weights() const { return received || weights; }

  // Scores are stored without the scale, which then costs no step of its own: it is part of the factor between
  // differences of scores and exponents of 2. Only its sign goes into the query. Where softcap or alibi ask for a
  // step anyway, it applies the scale as well; so does the query where a scale is too small to divide by.
  bool adjusted() const { return softcap > 0 || slopes; }
  float query_factor() const { return adjusted() ? 1.f : unit() == 1.f ? scale : scale < 0 ? -1.f : 1.f; }
  float unit() const {  // a score is a stored score times this
    float size = scale < 0 ? -scale : scale;
    return adjusted() || size < 1e-9f ? 1.f : size;
  }
};

// What the gradients are made from, beside the forward's request, and where they go. Null: not given, or not asked.
struct Gradient {
  const void *output, *output_grad;                 // [b, h, i, e] in the inputs' dtype
  int64_t output_stride[4], output_grad_stride[4];
  const float *lse, *lse_rest, *max_score, *entropy; // [b, h, i], the forward's results; entropy with its gradient
  const float *lse_grad, *max_score_grad, *entropy_grad;
  const float *received_grad, *weights_grad;        // [b, h, j] (of the queries in received_from), [b, h, i, j]
  float *query_grad, *key_grad, *value_grad;        // [b, h, i, d], [b, g, j, d], [b, g, j, e]; zeros on entry
  float *slopes_grad;                               // [b, h, i]: each query's part of its head's
  float *sink_grad;                                 // [b, h, i]: each query's part

  bool of_weights() const { return received_grad || weights_grad; }
  bool looks_first() const { return of_weights() || max_score_grad; }
};

constexpr int kGroup = 6;    // query rows in one register tile
constexpr int kPanel = 64;   // keys in one packed panel
constexpr int kBlock = 96;   // query rows that share a pass over the keys
constexpr int kTile = 256;   // keys between two updates of the running maximum
constexpr int kMaxWidth = 16;

// The packed keys and values of one key head. With `state`, tiles are packed by whichever thread
// needs them first and shared; without, the buffers hold one tile and belong to one thread.
struct Packed {
  float *keys;           // [panel][d][64]
  float *values;         // [tile][value panel][256][panel width]
  int32_t *state;        // per tile: 0 raw, 1 being packed, 2 packed
  uint8_t *unsafe;       // per tile: some value is NaN or infinite
};

// The running softmax of a block of rows. Scores are as stored: see Request::unit.
struct Rows {
  int64_t count;
  float *reference;      // [rows] what exponents are relative to: the largest score so far, or the sink
  float *largest;        // [rows] the largest score so far, without the sink
  float *sum;            // [rows][16] lanes of the sum of exp2(x), x = (score - reference) * unit * log2(e)
  float *moment;         // [rows][16] lanes of the sum of exp2(x) * x
  float *output;         // [rows][padded e]
  float *weights;        // [rows][weights_stride] exp2(x) by the reference of its tile; first column is key `origin`
  int64_t weights_stride, origin;
  float *tile_reference; // [tile][rows_stride] the reference that `weights` was written with
  int64_t rows_stride;
};

// A thread's own memory.
struct Workspace {
  float *query;          // [rows][padded d], scaled
  float *tile_max;       // [rows][16]
  float *scores;         // [rows][kTile + 16], where weights need not be kept
  float *received;       // [heads per key][padded j], where asked
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
  float *query, *output_grad, *query_grad;   // [kPart][padded d or e]
  float *keys, *key_rows, *values;           // a tile: panels [d][64], rows in panels [256][columns], panels [e][64]
  float *key_grad, *value_grad;              // a tile [256][padded d or e]
  float *weights, *scores_grad, *chain;      // [kBlock][kTile + 16]; chain: derivative of the softcap
  float *clean;                              // a copy of rows or a panel without what may not be seen
  float *row[7];                             // [kPart] each
  uint8_t *unsafe;                           // [kPart]: the row of query or output_grad is NaN or infinite somewhere
};

// What an instruction set offers. One instance per level; see block.cpp.
struct Kernel {
  const char *name;
  int width;  // floats in a vector
  void (*attend)(const Request &, const Task &, Packed &, Workspace &, Rows &);
  void (*merge)(const Request &, Rows &into, const Rows &from);
  // Output and readouts of finished rows. Adds received to work.received[head][j - *first], and returns
  // in first and last the range of keys it touched.
  void (*finish)(const Request &, const Task &, Workspace &, Rows &, int64_t *first, int64_t *last);
  void (*differentiate)(const Request &, const Gradient &, const Part &, GradientSpace &);
  double (*peak)(int64_t steps);  // multiply-adds and nothing else: the ceiling benchmarks compare with
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace einsight

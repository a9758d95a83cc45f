// The Python module's functions: tensors in, pointers out. Compiled once for float and once for double.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "dlpack.h"
#include "driver.h"
#include "permission.h"
#include "threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nb = nanobind;

namespace einsight {
inline namespace EINSIGHT_PRECISION {

#if defined(__x86_64__)
namespace baseline { extern const Kernel kernel; }
namespace avx2 { extern const Kernel kernel; }
namespace avx512 { extern const Kernel kernel; }
namespace avx512_bf16 { extern const Kernel kernel; }
#if EINSIGHT_AMX
namespace amx { extern const Kernel kernel; }
#endif
#else
namespace generic { extern const Kernel kernel; }
#endif

// What this processor can run, best first.
static std::vector<const Kernel *> available() {
  std::vector<const Kernel *> kernels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    // Pairs of bfloat16 numbers take half the time of floats on AMD's processors, and 1.6 times theirs on Intel's.
    bool pairs = __builtin_cpu_supports("avx512bf16"), quick = __builtin_cpu_is("amd");
#if EINSIGHT_AMX
    if (pairs && may_use_tiles()) kernels.push_back(&amx::kernel);
#endif
    if (pairs && quick) kernels.push_back(&avx512_bf16::kernel);
    kernels.push_back(&avx512::kernel);
    if (pairs && !quick) kernels.push_back(&avx512_bf16::kernel);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels.push_back(&avx2::kernel);
  kernels.push_back(&baseline::kernel);
#else
  kernels.push_back(&generic::kernel);
#endif
  return kernels;
}

static const std::vector<const Kernel *> kernels = available();

static bool interrupted() {
  nb::gil_scoped_acquire hold;
  return PyErr_CheckSignals() != 0;
}

// Large results come from fresh memory, where page faults take longer than the arithmetic: 2 MiB pages cut that
// to a third. A hint; nothing changes if the system declines.
static void ask_for_huge_pages(void *data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t page = 2 << 20;
  if (bytes < 4 * page) return;
  auto begin = round_up(reinterpret_cast<int64_t>(data), page);
  auto end = (reinterpret_cast<int64_t>(data) + bytes) / page * page;
  madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

template <class T> static T *result(nb::handle tensor) {
  if (tensor.is_none()) return nullptr;
  DLTensor t = borrow(tensor);
  int64_t bytes = t.dtype.bits / 8;
  for (int n = 0; n < t.ndim; n++) bytes *= t.shape[n];
  ask_for_huge_pages(t.address(), bytes);
  return static_cast<T *>(t.address());
}

template <int n> static const void *input(nb::handle tensor, int64_t (&stride)[n]) {
  if (tensor.is_none()) return nullptr;
  DLTensor t = borrow(tensor);
  if (t.ndim != n) throw std::invalid_argument("expected a tensor of " + std::to_string(n) + " dimensions");
  // A dimension of one element may be broadcast, whatever stride it carries.
  for (int k = 0; k < n; k++) stride[k] = t.shape[k] == 1 ? 0 : t.strides[k];
  static const Real nothing = 0;  // an empty tensor has no address, but null means that there is no tensor
  return t.address() ? t.address() : &nothing;
}

template <class T> static const T *vector(nb::handle tensor) {
  return tensor.is_none() ? nullptr : static_cast<const T *>(borrow(tensor).address());
}

// A number for each query head.
static const Real *per_head(nb::handle tensor, int64_t heads) {
  if (!tensor.is_none() && borrow(tensor).shape[0] != heads) throw std::invalid_argument("expected a number per head");
  return vector<Real>(tensor);
}

// A bound of a rule: a tensor, or how far ahead of each query's row it lies; None is none, which `far` is.
static const int64_t *bound(nb::handle given, int64_t (&stride)[3], int64_t &ahead, int64_t far) {
  bool is_number = PyLong_Check(given.ptr());
  ahead = is_number ? nb::cast<int64_t>(given) : far;
  return is_number ? nullptr : static_cast<const int64_t *>(input(given, stride));
}

// Fills in the parts of a rule: (lo, hi, seen, shows, query_ids, key_ids); all but `shows` may be None.
static void read_rule(nb::sequence given, int64_t keys, Rule &rule) {
  constexpr int64_t far = int64_t(1) << 60;  // no sum with a row overflows
  rule.lo = bound(given[0], rule.lo_stride, rule.lo_ahead, -far);
  rule.hi = bound(given[1], rule.hi_stride, rule.hi_ahead, far);
  rule.seen = static_cast<const uint8_t *>(input(given[2], rule.seen_stride));
  rule.shows = nb::cast<bool>(given[3]);
  rule.query_ids = static_cast<const int64_t *>(input(given[4], rule.query_ids_stride));
  rule.key_ids = static_cast<const int64_t *>(input(given[5], rule.key_ids_stride));
  rule.end = keys;
}

// What a readout asks: (kind, number, count, slot, rule or None, member or None, result, indices or None). A member
// is a tensor of ids [#b, j] or of weights [#b, j, n], dense.
static Ask ask_of(nb::sequence given, int64_t keys) {
  Ask ask{};
  ask.kind = static_cast<Kind>(nb::cast<int>(given[0]));
  ask.number = nb::cast<int64_t>(given[1]), ask.count = nb::cast<int64_t>(given[2]);
  ask.slot = vector<int64_t>(given[3]);
  nb::object rule = given[4], member = given[5];
  if (!rule.is_none()) read_rule(nb::cast<nb::sequence>(rule), keys, ask.rule);
  if (!member.is_none()) {
    DLTensor t = borrow(member);
    ask.ids = static_cast<const int64_t *>(t.address()), ask.matrix = static_cast<const Real *>(t.address());
    int64_t size = t.ndim == 2 ? t.shape[1] : t.shape[1] * t.shape[2];
    ask.item_stride = t.shape[0] == 1 ? 0 : size;
  }
  nb::object of = given[6];
  ask.result = result<Real>(of);
  nb::object indices = given[7];
  if (!indices.is_none()) ask.indices = static_cast<int64_t *>(borrow(indices).address());
  return ask;
}

// Whether queries and keys can be read two numbers at a time, and need no factor but a sign.
static bool can_pair(const Request &a) {
  Real factor = a.query_factor();
  bool even = a.dtype == Dtype::bfloat16 && a.d % 2 == 0 && a.query_stride[3] == 1 && a.key_stride[3] == 1;
  for (int n = 0; n < 3; n++) even = even && a.query_stride[n] % 2 == 0 && a.key_stride[n] % 2 == 0;
  return even && (factor == 1.f || factor == -1.f);
}

static Request request(nb::handle query, nb::handle key, nb::handle value, Real scale, Real softcap, nb::handle sink,
                       nb::handle slopes, nb::handle bias, nb::handle positions, nb::sequence rule, int level) {
  Request a{};
  a.query = input(query, a.query_stride);
  a.key = input(key, a.key_stride);
  a.value = input(value, a.value_stride);
  DLTensor q = borrow(query), k = borrow(key);
  a.b = q.shape[0], a.h = q.shape[1], a.i = q.shape[2], a.d = q.shape[3];
  a.g = k.shape[1], a.j = k.shape[2], a.e = a.value ? borrow(value).shape[3] : 0;
  a.dtype = q.dtype.bits == 64 ? Dtype::float64 : q.dtype.bits == 32 ? Dtype::float32 : q.dtype.code == kBfloat ? Dtype::bfloat16 : Dtype::float16;
  a.scale = scale, a.softcap = softcap;
  a.sink = per_head(sink, a.h), a.slopes = per_head(slopes, a.h);
  a.positions = static_cast<const int64_t *>(input(positions, a.positions_stride));
  a.bias = static_cast<const Real *>(input(bias, a.bias_stride));
  read_rule(rule, a.j, a);
  a.pairs = kernels.at(level)->has_pairs && can_pair(a);
  a.tiles = a.pairs && kernels.at(level)->has_tiles && a.rows() > kGroup;
  return a;
}

static std::vector<Ask> asked(nb::sequence given, int64_t keys) {
  std::vector<Ask> asks;
  for (nb::handle one : given) asks.push_back(ask_of(nb::cast<nb::sequence>(one), keys));
  return asks;
}

static void forward(nb::handle query, nb::handle key, nb::handle value, Real scale, Real softcap, nb::handle sink,
                    nb::handle slopes, nb::handle bias, nb::handle positions, nb::sequence rule, nb::handle output,
                    nb::handle lse, nb::handle max_score, nb::handle entropy, nb::handle scores, nb::handle lse_rest,
                    nb::sequence asks, int threads, int level) {
  Request a = request(query, key, value, scale, softcap, sink, slopes, bias, positions, rule, level);
  a.output = result<void>(output);
  a.lse = result<Real>(lse), a.max_score = result<Real>(max_score), a.entropy = result<Real>(entropy);
  a.scores = result<Real>(scores), a.lse_rest = result<Real>(lse_rest);
  std::vector<Ask> all = asked(asks, a.j);
  a.asks = all.data(), a.ask_count = all.size();
  bool done;
  {
    nb::gil_scoped_release release;
    done = attention(a, *kernels.at(level), threads, interrupted);
  }
  if (!done) throw nb::python_error();
}

static void backward(nb::handle query, nb::handle key, nb::handle value, Real scale, Real softcap, nb::handle sink,
                     nb::handle slopes, nb::handle bias, nb::handle positions, nb::sequence rule, nb::handle output,
                     nb::handle lse, nb::handle max_score, nb::handle entropy, nb::handle lse_rest,
                     nb::handle output_grad, nb::handle lse_grad, nb::handle max_score_grad, nb::handle entropy_grad,
                     nb::sequence asks, nb::handle query_grad, nb::handle key_grad, nb::handle value_grad,
                     nb::handle sink_grad, nb::handle slopes_grad, nb::handle bias_grad, int threads, int level) {
  Request a = request(query, key, value, scale, softcap, sink, slopes, bias, positions, rule, level);
  Gradient g{};
  g.output = input(output, g.output_stride);
  g.output_grad = input(output_grad, g.output_grad_stride);
  g.lse = vector<Real>(lse), g.max_score = vector<Real>(max_score), g.entropy = vector<Real>(entropy);
  g.lse_rest = vector<Real>(lse_rest);
  g.lse_grad = vector<Real>(lse_grad), g.max_score_grad = vector<Real>(max_score_grad);
  g.entropy_grad = vector<Real>(entropy_grad);
  std::vector<Ask> all = asked(asks, a.j);
  g.asks = all.data(), g.ask_count = all.size();
  g.query_grad = result<Real>(query_grad), g.key_grad = result<Real>(key_grad), g.value_grad = result<Real>(value_grad);
  g.sink_grad = result<Real>(sink_grad), g.slopes_grad = result<Real>(slopes_grad), g.bias_grad = result<Real>(bias_grad);
  g.is_rounded = a.dtype == Dtype::bfloat16 || a.dtype == Dtype::float16;
  if (g.bias_grad) {
    DLTensor t = borrow(bias_grad);
    for (int n = 0; n < 2; n++) g.bias_grad_stride[n] = t.shape[n] == 1 ? 0 : t.strides[n];
  }
  bool done;
  {
    nb::gil_scoped_release release;
    done = gradients(a, g, *kernels.at(level), threads, interrupted);
  }
  if (!done) throw nb::python_error();
}

void define(nb::module_ &m) {
  std::vector<std::string> names;
  for (auto kernel : kernels) names.push_back(kernel->name);
  m.attr("levels") = nb::cast(names);
  m.def("forward", forward,
        nb::arg("query"), nb::arg("key"), nb::arg("value").none(), nb::arg("scale"), nb::arg("softcap"),
        nb::arg("sink").none(), nb::arg("slopes").none(), nb::arg("bias").none(), nb::arg("positions").none(),
        nb::arg("rule"), nb::arg("output").none(), nb::arg("lse").none(), nb::arg("max_score").none(),
        nb::arg("entropy").none(), nb::arg("scores").none(), nb::arg("lse_rest").none(), nb::arg("asks"),
        nb::arg("threads"), nb::arg("level"));
  m.def("backward", backward,
        nb::arg("query"), nb::arg("key"), nb::arg("value").none(), nb::arg("scale"), nb::arg("softcap"),
        nb::arg("sink").none(), nb::arg("slopes").none(), nb::arg("bias").none(), nb::arg("positions").none(),
        nb::arg("rule"), nb::arg("output").none(), nb::arg("lse"), nb::arg("max_score"), nb::arg("entropy").none(),
        nb::arg("lse_rest"), nb::arg("output_grad").none(), nb::arg("lse_grad").none(),
        nb::arg("max_score_grad").none(), nb::arg("entropy_grad").none(), nb::arg("asks"),
        nb::arg("query_grad").none(), nb::arg("key_grad").none(), nb::arg("value_grad").none(),
        nb::arg("sink_grad").none(), nb::arg("slopes_grad").none(), nb::arg("bias_grad").none(), nb::arg("threads"),
        nb::arg("level"));
  m.def("peak", [](int64_t steps, int threads, int level) {
    struct Shared { const Kernel *kernel; int64_t steps; } shared{kernels.at(level), steps};
    nb::gil_scoped_release release;
    parallel(threads, [](void *p) {
      auto s = static_cast<Shared *>(p);
      volatile double keep = s->kernel->peak(s->steps);
      (void)keep;
    }, &shared);
    return 2. * 12 * shared.kernel->width * steps * threads;
  }, nb::arg("steps"), nb::arg("threads"), nb::arg("level") = 0,
     "Runs nothing but multiply-adds, and returns how many operations they were.");
}

}  // namespace EINSIGHT_PRECISION
}  // namespace einsight

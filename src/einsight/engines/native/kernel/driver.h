#pragma once
#include "request.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {

// Computes the request. False if `interrupted` said to stop; the results are then unfinished.
bool attention(const Request &, const Kernel &, int threads, bool (*interrupted)());

// The gradients of the same. False if a signal came, as before.
bool gradients(const Request &, const Gradient &, const Kernel &, int threads, bool (*interrupted)());

}  // namespace EINSIGHT_PRECISION
}  // namespace einsight

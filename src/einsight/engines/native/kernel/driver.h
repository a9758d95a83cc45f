#pragma once
#include "request.h"

namespace einsight {

// Computes the request. False if `interrupted` said to stop; the results are then unfinished.
bool attention(const Request &, const Kernel &, int threads, bool (*interrupted)());

}  // namespace einsight

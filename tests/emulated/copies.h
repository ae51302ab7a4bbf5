// What all copies are held to.
#pragma once
#include <cstddef>

namespace emulated {

// Whether an allocation ends no earlier; says on stderr which copy runs over one's end. Pageable memory is not known.
bool stays_inside(const void* start, size_t bytes);

}  // namespace emulated

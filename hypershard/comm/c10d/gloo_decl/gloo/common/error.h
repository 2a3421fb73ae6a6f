// Stands in for a gloo header that ProcessGroupGloo.hpp includes but takes nothing from.
// See NOTE [gloo declarations] in gloo/context.h.
#pragma once

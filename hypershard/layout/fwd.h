// Forward declarations of the layout vocabulary.
// For headers that only name these types, so that they need none of their definitions.
#pragma once

namespace hypershard::layout {

class Topology;

enum class Tier;
struct MeshAxis;
class DeviceMesh;

struct Placement;
struct Layout;
struct TensorSpec;

struct Block;
struct BlockRun;

struct RedistributionStep;
struct RedistributionOptions;
struct Traffic;

enum class Strategy;
struct PlaneLayouts;
struct DataAxes;

struct PackRequest;
struct Segment;
struct Range;
struct PackOptions;
struct GroupPacking;

struct Bucket;
struct BucketGroup;

}  // namespace hypershard::layout

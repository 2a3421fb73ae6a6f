// Why: names of the module's classes for headers that only point at them.
// Nothing here needs torch.
#pragma once

#include <memory>

namespace hypershard::comm {

enum class Backend;
class CollectiveLog;
class Communicator;
class EpochBoard;
struct GroupInfo;
struct LogEntry;
class ProcessMesh;
class SharedBuffer;
class SymmetricArena;
class Work;
using WorkPtr = std::shared_ptr<Work>;
class World;
struct WorldOptions;

}  // namespace hypershard::comm

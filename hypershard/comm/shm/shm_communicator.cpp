// Why: see shm_communicator.h. Rank 0 of the group makes each piece of memory and offers it; the
// others answer; its verdict makes success or failure common to all.
#include "hypershard/comm/shm/shm_communicator.h"

#include <optional>
#include <utility>
#include <vector>

#include "hypershard/comm/shm/internal/shared_memory_communicator.h"
#include "hypershard/comm/shm/internal/socket_mesh.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

using internal::MeshMessage;
using internal::OwnedFd;
using internal::RegionUse;

/// One allocation as this rank asks for it.
struct Request {
  std::int64_t index;
  std::int64_t bytes;
  std::string what;
  RegionUse use;
};

std::string request_text(std::int64_t bytes, std::string_view what) {
  return concat_text(bytes, " bytes for ", what);
}

/// Memory of a group of processes.
class ShmSource : public internal::RegionSource {
 public:
  ShmSource(const GroupInfo& info, const ShmRendezvous& rendezvous)
      : info_(info),
        mesh_(info, rendezvous.nonce, rendezvous.why_absent),
        watch_stall_(rendezvous.watch_stall) {}

  std::string name() const override { return "shm"; }
  bool reads_any_memory() const override { return false; }
  std::vector<int> lost_peers() override { return mesh_.lost_peers(); }
  void keep(std::vector<at::Tensor>) override {}  // peers have mappings of their own
  std::function<std::string()> watch_stall(std::string during) override {
    return watch_stall_ ? watch_stall_(std::move(during)) : nullptr;
  }

  std::shared_ptr<SharedBuffer> allocate(
      std::int64_t bytes,
      std::string_view what,
      RegionUse use,
      const std::function<void()>& progress
  ) override {
    const Request request{num_allocations_++, bytes, std::string(what), use};
    return info_.rank == 0 ? offer(request, progress) : accept(request, progress);
  }

 private:
  std::shared_ptr<SharedBuffer> offer(
      const Request& request, const std::function<void()>& progress
  );
  std::shared_ptr<SharedBuffer> accept(
      const Request& request, const std::function<void()>& progress
  );
  /// Collects the peers' answers; returns the first complaint.
  std::string answers(const Request& request, const std::function<void()>& progress);
  std::optional<std::string> mismatch(const Request& request, const MeshMessage& offer) const;
  void tell_all(MeshMessage::Kind kind, const Request& request, const std::string& failure, int fd);
  [[noreturn]] void fail(const Request& request, std::string_view failure) const;

  GroupInfo info_;
  internal::SocketMesh mesh_;
  std::function<std::function<std::string()>(std::string)> watch_stall_;
  std::int64_t num_allocations_ = 0;
};

void ShmSource::tell_all(
    MeshMessage::Kind kind, const Request& request, const std::string& failure, int fd
) {
  MeshMessage message;
  message.kind = kind;
  message.failed = failure.empty() ? 0 : 1;
  message.index = request.index;
  message.bytes = request.bytes;
  message.use = static_cast<std::uint32_t>(request.use);
  message.set_text(failure.empty() ? request.what : failure);
  for (int peer = 1; peer < static_cast<int>(info_.global_ranks.size()); ++peer) {
    try {
      mesh_.send(peer, message, fd);
    } catch (const CommError&) {  // raw-throw: a peer that is gone is found when it should answer
    }
  }
}

void ShmSource::fail(const Request& request, std::string_view failure) const {
  HS_FAIL(
      CommError,
      "comm.shm: the ranks of '",
      info_.name,
      "' cannot share ",
      request_text(request.bytes, request.what),
      ": ",
      failure
  );
}

std::string ShmSource::answers(const Request& request, const std::function<void()>& progress) {
  std::string failure;
  for (int peer = 1; peer < static_cast<int>(info_.global_ranks.size()); ++peer) {
    const MeshMessage answer = mesh_.receive(peer, request.what, progress);
    if (answer.failed != 0 && failure.empty()) {
      failure = concat_text(
          "rank ",
          peer,
          " (global ",
          info_.global_ranks[static_cast<std::size_t>(peer)],
          ") says: ",
          std::string(answer.text)
      );
    }
  }
  return failure;
}

std::shared_ptr<SharedBuffer> ShmSource::offer(
    const Request& request, const std::function<void()>& progress
) {
  OwnedFd fd;
  std::shared_ptr<SharedBuffer> memory;
  std::string failure;
  try {
    fd = internal::create_memory(request.bytes, request.what, request.use);
    memory = internal::map_memory(fd.get(), request.bytes, request.what, request.use);
  } catch (const CommError& error) {  // raw-throw: told to all ranks below
    failure = error.what_brief();
  }
  tell_all(MeshMessage::Kind::kOffer, request, failure, failure.empty() ? fd.get() : -1);
  if (!failure.empty()) {
    fail(request, failure);
  }
  try {
    failure = answers(request, progress);
  } catch (const CommError& error) {
    tell_all(MeshMessage::Kind::kVerdict, request, error.what_brief(), -1);
    throw;  // raw-throw: the others have been told why this rank goes
  }
  tell_all(MeshMessage::Kind::kVerdict, request, failure, -1);
  if (!failure.empty()) {
    fail(request, failure);
  }
  return memory;
}

std::optional<std::string> ShmSource::mismatch(const Request& request, const MeshMessage& offer)
    const {
  const std::string_view offered(offer.text);
  const bool same_text = request.what.starts_with(offered);  // long texts travel cut
  if (offer.index == request.index && offer.bytes == request.bytes && same_text &&
      offer.use == static_cast<std::uint32_t>(request.use)) {
    return std::nullopt;
  }
  return concat_text(
      "it asks for ",
      request_text(request.bytes, request.what),
      " as allocation ",
      request.index,
      ", rank 0 for ",
      request_text(offer.bytes, offered),
      " as allocation ",
      offer.index
  );
}

std::shared_ptr<SharedBuffer> ShmSource::accept(
    const Request& request, const std::function<void()>& progress
) {
  OwnedFd fd;
  const MeshMessage offer = mesh_.receive(0, request.what, progress, &fd);
  if (offer.failed != 0) {
    fail(request, std::string("rank 0 says: ") + offer.text);
  }
  std::shared_ptr<SharedBuffer> memory;
  std::string failure = mismatch(request, offer).value_or("");
  if (failure.empty()) {
    try {
      memory = internal::map_memory(fd.get(), request.bytes, request.what, request.use);
    } catch (const CommError& error) {  // raw-throw: told to all ranks below
      failure = error.what_brief();
    }
  }
  MeshMessage answer;
  answer.kind = MeshMessage::Kind::kAnswer;
  answer.index = request.index;
  answer.failed = failure.empty() ? 0 : 1;
  answer.set_text(failure);
  mesh_.send(0, answer);
  const MeshMessage verdict = mesh_.receive(0, request.what, progress);
  if (verdict.failed != 0) {
    fail(request, verdict.text);
  }
  return memory;
}

}  // namespace

std::shared_ptr<Communicator> make_shm_communicator(
    GroupInfo info, const ShmRendezvous& rendezvous
) {
  HS_CHECK(
      !rendezvous.nonce.empty(),
      "comm.shm: the nonce for '",
      info.name,
      "' is empty",
      HS_HINT("give the ranks of a job a name that no other job on the host has")
  );
  auto source = std::make_shared<ShmSource>(info, rendezvous);
  internal::SharedOptions options;
  options.staging_bytes = rendezvous.staging_bytes;
  options.step_bytes = rendezvous.step_bytes;
  return std::make_shared<internal::SharedMemoryCommunicator>(
      std::move(info), std::move(source), options
  );
}

}  // namespace hypershard::comm

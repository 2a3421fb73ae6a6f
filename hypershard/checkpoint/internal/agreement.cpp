// See agreement.h. A rank's result travels as one letter, which says how it went, and a text.
#include "hypershard/checkpoint/internal/agreement.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>

#include <ATen/ops/empty.h>

#include "hypershard/core/error.h"

namespace hypershard::checkpoint::internal {

namespace {

constexpr char kGood = '+';
constexpr char kInvalid = 'a';
constexpr char kUnsupported = 'u';
constexpr char kIo = 'i';
constexpr char kOther = 'x';

char letter_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  switch (ours == nullptr ? ErrorCode::kInternal : ours->code()) {
    case ErrorCode::kInvalidArgument:
      return kInvalid;
    case ErrorCode::kUnsupported:
      return kUnsupported;
    case ErrorCode::kIo:
      return kIo;
    default:
      return kOther;
  }
}

// The message without `[rank 2/4] `, which is said anew.
std::string text_of_error(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  std::string text = ours == nullptr ? error.what() : ours->what_brief();
  if (text.starts_with("[rank ")) {
    text.erase(0, std::min(text.size(), text.find("] ") + 2));
  }
  return text;
}

[[noreturn]] void fail(char letter, const std::string& text) {
  switch (letter) {
    case kInvalid:
      HS_FAIL(InvalidArgument, text);
    case kUnsupported:
      HS_FAIL(Unsupported, text);
    case kIo:
      HS_FAIL(IoError, text);
    default:
      HS_FAIL(InternalError, text);
  }
}

}  // namespace

std::vector<std::string> exchange_texts(comm::Communicator& ranks, const std::string& mine) {
  const auto num_ranks = static_cast<std::size_t>(ranks.size());
  if (num_ranks == 1) {
    return {mine};
  }
  const at::Tensor own_size = at::empty({1}, at::TensorOptions().dtype(at::kLong));
  *own_size.mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(mine.size());
  const at::Tensor sizes = at::empty({ranks.size()}, own_size.options());
  ranks.all_gather(sizes, own_size, {}, "checkpoint")->wait_released();
  const auto* counts = sizes.const_data_ptr<std::int64_t>();
  std::int64_t total = 0;
  for (std::size_t r = 0; r < num_ranks; ++r) {
    total += counts[r];
  }
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte);
  const at::Tensor own = at::empty({static_cast<std::int64_t>(mine.size())}, bytes);
  std::copy_n(mine.data(), mine.size(), static_cast<char*>(own.mutable_data_ptr()));
  const at::Tensor all = at::empty({total}, bytes);
  ranks.all_gather(all, own, {counts, num_ranks}, "checkpoint")->wait_released();
  std::vector<std::string> texts;
  const auto* at = static_cast<const char*>(all.const_data_ptr());
  for (std::size_t r = 0; r < num_ranks; ++r) {
    texts.emplace_back(at, static_cast<std::size_t>(counts[r]));
    at += counts[r];
  }
  return texts;
}

std::vector<std::string> together(
    comm::Communicator& ranks, const std::function<std::string()>& body
) {
  std::string mine;
  try {
    mine = kGood + body();
  } catch (const std::exception& error) {
    mine = letter_of(error) + text_of_error(error);
  }
  std::vector<std::string> all = exchange_texts(ranks, mine);
  const auto failed = [](const std::string& text) { return text.front() != kGood; };
  const auto first = std::find_if(all.begin(), all.end(), failed);
  if (first == all.end()) {
    for (std::string& text : all) {
      text.erase(0, 1);
    }
    return all;
  }
  const auto others = std::count_if(first + 1, all.end(), failed);
  const int rank = ranks.info().global_ranks[static_cast<std::size_t>(first - all.begin())];
  std::string text = first->substr(1);
  if (ranks.size() > 1) {
    const std::string more = others > 0 ? concat_text(" (and ", others, " more)") : std::string();
    text = concat_text("on rank ", rank, more, ": ", text);
  }
  fail(first->front(), text);
}

}  // namespace hypershard::checkpoint::internal

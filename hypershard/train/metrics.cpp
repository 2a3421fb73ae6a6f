// Why: plain write(2) instead of a stream: every failure has an errno to report, and there is no
// buffer that a crash could lose.
#include "hypershard/train/metrics.h"

#include <cerrno>
#include <cmath>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <nlohmann/json.hpp>

#include "hypershard/core/error.h"

namespace hypershard::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kReadBytes = 1 << 20;

Json optional_number(const std::optional<double>& value) {
  return value.has_value() ? Json(*value) : Json(nullptr);
}

double number_or_nan(const nlohmann::json& object, const char* name) {
  const nlohmann::json& value = object.at(name);
  return value.is_null() ? std::nan("") : value.get<double>();
}

std::optional<double> read_optional(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? std::nullopt
                                                   : std::optional(found->get<double>());
}

std::optional<std::int64_t> read_bytes(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? std::nullopt
                                                   : std::optional(found->get<std::int64_t>());
}

std::int64_t step_of(std::string_view line, const std::string& path) {
  try {
    return parse_metrics(line).step;
  } catch (const InvalidArgument& error) {
    HS_FAIL(
        InvalidArgument,
        error.what_brief(),
        " (in '",
        path,
        "')",
        HS_HINT("mend the line, or move the file away: the run then goes on in a new one")
    );
  }
}

[[noreturn]] void fail(const std::string& path, const char* what, int error_number) {
  HS_FAIL(
      IoError,
      "train.metrics: cannot ",
      what,
      " '",
      path,
      "': ",
      errno_text(error_number),
      HS_HINT(
          error_number == ENOSPC ? "free some space, then go on with --resume"
                                 : "choose another file with log.metrics, or another run.dir"
      )
  );
}

std::string read_all(int fd, const std::string& path) {
  std::string text;
  std::string piece(kReadBytes, '\0');
  while (true) {
    const ssize_t got = ::pread(fd, piece.data(), piece.size(), static_cast<off_t>(text.size()));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail(path, "read", errno);
    }
    if (got == 0) {
      return text;
    }
    text.append(piece, 0, static_cast<std::size_t>(got));
  }
}

}  // namespace

std::string to_json(const StepMetrics& metrics) {
  return Json{
      {"step", metrics.step},
      {"loss", metrics.loss},
      {"eval_loss", optional_number(metrics.eval_loss)},
      {"eval_nats_a_byte", optional_number(metrics.eval_nats_a_byte)},
      {"lr", metrics.lr},
      {"grad_norm", metrics.grad_norm},
      {"step_ms", metrics.step_ms},
      {"tokens_per_s", metrics.tokens_per_s},
      {"mfu", optional_number(metrics.mfu)},
      {"exposed_comm_share", metrics.exposed_comm_share},
      {"exposed_inside_share", metrics.exposed_inside_share},
      {"exposed_between_share", metrics.exposed_between_share},
      {"inside_bytes_per_s", optional_number(metrics.inside_bytes_per_s)},
      {"inside_overlap", optional_number(metrics.inside_overlap)},
      {"between_bytes_per_s", optional_number(metrics.between_bytes_per_s)},
      {"between_overlap", optional_number(metrics.between_overlap)},
      {"peak_bytes", metrics.peak_bytes},
      {"job_bytes", metrics.job_bytes ? Json(*metrics.job_bytes) : Json(nullptr)},
      {"tokens_seen", metrics.tokens_seen},
      {"copied_bytes", metrics.copied_bytes},
      {"accumulated_bytes", metrics.accumulated_bytes},
      {"gathered_bytes", metrics.gathered_bytes},
      {"reduced_bytes", metrics.reduced_bytes},
      {"published_bytes", metrics.published_bytes},
      {"inside_bytes", metrics.inside_bytes},
      {"between_bytes", metrics.between_bytes},
  }
      .dump();
}

StepMetrics parse_metrics(std::string_view line) {
  try {
    const nlohmann::json object = nlohmann::json::parse(line);
    return {
        .step = object.at("step").get<std::int64_t>(),
        .loss = number_or_nan(object, "loss"),
        .eval_loss = read_optional(object, "eval_loss"),
        .eval_nats_a_byte = read_optional(object, "eval_nats_a_byte"),
        .lr = number_or_nan(object, "lr"),
        .grad_norm = number_or_nan(object, "grad_norm"),
        .step_ms = number_or_nan(object, "step_ms"),
        .tokens_per_s = number_or_nan(object, "tokens_per_s"),
        .mfu = read_optional(object, "mfu"),
        .exposed_comm_share = number_or_nan(object, "exposed_comm_share"),
        .exposed_inside_share = number_or_nan(object, "exposed_inside_share"),
        .exposed_between_share = number_or_nan(object, "exposed_between_share"),
        .inside_bytes_per_s = read_optional(object, "inside_bytes_per_s"),
        .inside_overlap = read_optional(object, "inside_overlap"),
        .between_bytes_per_s = read_optional(object, "between_bytes_per_s"),
        .between_overlap = read_optional(object, "between_overlap"),
        .peak_bytes = object.at("peak_bytes").get<std::int64_t>(),
        .job_bytes = read_bytes(object, "job_bytes"),
        .tokens_seen = object.at("tokens_seen").get<std::int64_t>(),
        .copied_bytes = object.at("copied_bytes").get<std::int64_t>(),
        .accumulated_bytes = object.at("accumulated_bytes").get<std::int64_t>(),
        .gathered_bytes = object.at("gathered_bytes").get<std::int64_t>(),
        .reduced_bytes = object.at("reduced_bytes").get<std::int64_t>(),
        .published_bytes = object.at("published_bytes").get<std::int64_t>(),
        .inside_bytes = object.at("inside_bytes").get<std::int64_t>(),
        .between_bytes = object.at("between_bytes").get<std::int64_t>()
    };
  } catch (const nlohmann::json::exception& error) {
    HS_FAIL(
        InvalidArgument,
        "train.metrics: not a line of metrics: '",
        line.substr(0, 80),
        "': ",
        error.what()
    );
  }
}

MetricsWriter::MetricsWriter(std::string path, std::int64_t steps_done) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_APPEND, 0666);
  if (fd_ < 0) {
    fail(path_, "open", errno);
  }
  try {
    cut_after(steps_done);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

MetricsWriter::~MetricsWriter() {
  ::close(fd_);
}

void MetricsWriter::cut_after(std::int64_t steps_done) {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) {
    fail(path_, "examine", errno);
  }
  if (!S_ISREG(status.st_mode)) {
    return;  // a pipe or a device has no past
  }
  std::size_t keep = 0;
  if (steps_done > 0) {
    const std::string text = read_all(fd_, path_);
    while (keep < text.size()) {
      const std::size_t end = text.find('\n', keep);
      // A line without an end is what a crash or a full disk left.
      if (end == std::string::npos ||
          step_of(std::string_view(text).substr(keep, end - keep), path_) > steps_done) {
        break;
      }
      keep = end + 1;
    }
  }
  if (static_cast<off_t>(keep) != status.st_size &&
      ::ftruncate(fd_, static_cast<off_t>(keep)) != 0) {
    fail(path_, "shorten", errno);
  }
}

void MetricsWriter::write(const StepMetrics& metrics) {
  const std::string line = to_json(metrics) + "\n";
  std::size_t done = 0;
  while (done < line.size()) {
    const ssize_t written = ::write(fd_, line.data() + done, line.size() - done);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written < 0) {
      fail(path_, "write", errno);
    }
    done += static_cast<std::size_t>(written);
  }
}

}  // namespace hypershard::train

// Why: the system calls behind all-or-nothing files, with errors that name the path.
// The partial file carries the process id, so that two writers never share one.
#include "hypershard/data/internal/output_file.h"

#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "hypershard/core/error.h"

namespace hypershard::data::internal {
namespace {

// Writes the whole range or returns the errno that stopped it.
int write_fully(int fd, const char* data, std::size_t size, std::int64_t offset) {
  while (size > 0) {
    const ssize_t written =
        offset < 0 ? ::write(fd, data, size) : ::pwrite(fd, data, size, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return written < 0 ? errno : ENOSPC;
    }
    data += written;
    size -= static_cast<std::size_t>(written);
    offset += offset < 0 ? 0 : written;
  }
  return 0;
}

}  // namespace

OutputFile::OutputFile(std::string path)
    : path_(std::move(path)), partial_path_(path_ + ".partial-" + std::to_string(::getpid())) {
  fd_ = ::open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    fail("cannot be created", errno);
  }
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(partial_path_.c_str());
  }
}

void OutputFile::write(const void* data, std::size_t size) {
  const int error = write_fully(fd_, static_cast<const char*>(data), size, -1);
  if (error != 0) {
    fail("cannot be written", error);
  }
  size_bytes_ += size;
}

void OutputFile::overwrite(std::uint64_t offset, const void* data, std::size_t size) {
  HS_ASSERT(offset + size <= size_bytes_, path_, ": overwrite past the end: offset ", offset);
  const int error =
      write_fully(fd_, static_cast<const char*>(data), size, static_cast<std::int64_t>(offset));
  if (error != 0) {
    fail("cannot be written", error);
  }
}

void OutputFile::commit() {
  HS_ASSERT(fd_ >= 0, path_, ": committed twice");
  if (::fsync(fd_) != 0) {
    fail("cannot be flushed to the disk", errno);
  }
  if (::rename(partial_path_.c_str(), path_.c_str()) != 0) {
    fail("cannot be moved into place", errno);
  }
  ::close(std::exchange(fd_, -1));
  sync_folder();
}

// The rename itself is durable only once the folder is flushed; file systems that cannot flush a
// folder say so with EINVAL, and then there is nothing more to do.
void OutputFile::sync_folder() const {
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return;
  }
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  if (error != 0 && error != EINVAL) {
    fail("its folder cannot be flushed to the disk", error);
  }
}

void OutputFile::fail(const char* what, int error_number) const {
  const bool is_full = error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG;
  HS_FAIL(
      IoError,
      "data: ",
      path_,
      ": ",
      what,
      " after ",
      size_bytes_,
      " bytes: ",
      errno_text(error_number),
      HS_HINT(
          is_full ? "free some space or choose another folder"
                  : "check that its folder exists and may be written to"
      )
  );
}

void write_file(const std::string& path, std::string_view text) {
  OutputFile file(path);
  file.write(text);
  file.commit();
}

std::string read_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    HS_FAIL(IoError, "data: ", path, ": cannot be opened: ", errno_text(errno));
  }
  struct stat status {};
  std::string text;
  int error = ::fstat(fd, &status) == 0 ? 0 : errno;
  if (error == 0 && !S_ISREG(status.st_mode)) {
    ::close(fd);
    HS_FAIL(IoError, "data: ", path, ": is not a regular file");
  }
  text.resize(error == 0 ? static_cast<std::size_t>(status.st_size) : 0);
  std::size_t size = 0;
  while (error == 0 && size < text.size()) {
    const ssize_t count = ::read(fd, text.data() + size, text.size() - size);
    if (count == 0) {
      break;
    }
    if (count > 0) {
      size += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  ::close(fd);
  if (error != 0) {
    HS_FAIL(IoError, "data: ", path, ": cannot be read: ", errno_text(error));
  }
  text.resize(size);
  return text;
}

}  // namespace hypershard::data::internal

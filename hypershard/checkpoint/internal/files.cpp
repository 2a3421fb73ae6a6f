// See files.h.
#include "hypershard/checkpoint/internal/files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "hypershard/core/error.h"

namespace hypershard::checkpoint::internal {

namespace {

// Digested while it is still in the cache.
constexpr std::size_t kChunkBytes = std::size_t{1} << 20;

std::string hint_for(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "free some space or choose another folder";
    case EACCES:
    case EPERM:
    case EROFS:
      return "check that the folder may be written to";
    case ENOENT:
    case ENOTDIR:
      return "check the path; all ranks must see one file system";
    default:
      return {};
  }
}

[[noreturn]] void fail_at(const std::string& path, const char* what, int error_number) {
  HS_FAIL(
      IoError,
      "checkpoint: ",
      path,
      ": ",
      what,
      ": ",
      errno_text(error_number),
      HS_HINT(hint_for(error_number))
  );
}

int open_retrying(const char* path, int flags, mode_t mode) {
  int fd = -1;
  do {
    fd = ::open(path, flags, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

}  // namespace

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  fd_ = open_retrying(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    fail_at(path_, "cannot be created", errno);
  }
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void OutputFile::fail(const char* what, int error_number) const {
  HS_FAIL(
      IoError,
      "checkpoint: ",
      path_,
      ": ",
      what,
      " after ",
      size_bytes_,
      " bytes: ",
      errno_text(error_number),
      HS_HINT(hint_for(error_number))
  );
}

void OutputFile::write(std::span<const std::byte> data) {
  while (!data.empty()) {
    const std::size_t size = std::min(data.size(), kChunkBytes);
    checksum_.update(data.data(), size);
    write_chunk(data.data(), size);
    data = data.subspan(size);
  }
}

void OutputFile::write_chunk(const std::byte* data, std::size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(fd_, data, size);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      fail("cannot be written", written < 0 ? errno : ENOSPC);
    }
    data += written;
    size -= static_cast<std::size_t>(written);
    size_bytes_ += static_cast<std::uint64_t>(written);
  }
}

void OutputFile::finish() {
  HS_ASSERT(fd_ >= 0, path_, ": finished twice");
  if (::fsync(fd_) != 0) {
    fail("cannot be flushed to the disk", errno);
  }
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) {
    fail("cannot be closed", errno);
  }
}

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const int fd = open_retrying(path_.c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) {
    fail_at(path_, "cannot be opened", errno);
  }
  struct stat status {};
  int error = ::fstat(fd, &status) == 0 ? 0 : errno;
  if (error == 0 && !S_ISREG(status.st_mode)) {
    ::close(fd);
    HS_FAIL(IoError, "checkpoint: ", path_, ": is not a regular file");
  }
  const auto size = error == 0 ? static_cast<std::size_t>(status.st_size) : 0;
  if (size > 0) {
    void* mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    error = mapped == MAP_FAILED ? errno : 0;
    if (error == 0) {
      bytes_ = {static_cast<const std::byte*>(mapped), size};
    }
  }
  ::close(fd);
  if (error != 0) {
    fail_at(path_, "cannot be mapped", error);
  }
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) {
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
}

std::string read_text(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

void replace_text(const std::string& path, std::string_view text) {
  const std::string partial = path + ".tmp";
  OutputFile file(partial);
  file.write(text);
  file.finish();
  if (::rename(partial.c_str(), path.c_str()) != 0) {
    fail_at(path, "cannot be moved into place", errno);
  }
  sync_folder(std::filesystem::path(path).parent_path().string());
}

// File systems that cannot flush a folder say so with EINVAL, and then there is nothing more to do.
void sync_folder(const std::string& path) {
  const int fd =
      open_retrying(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) {
    fail_at(path, "the folder cannot be opened", errno);
  }
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  if (error != 0 && error != EINVAL) {
    fail_at(path, "the folder cannot be flushed to the disk", error);
  }
}

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    fail_at(path, "the folder cannot be made", error.value());
  }
  if (!std::filesystem::is_directory(path, error)) {
    fail_at(path, "the folder cannot be made", ENOTDIR);
  }
}

void remove_tree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) {
    fail_at(path, "cannot be removed", error.value());
  }
}

void replace_folder(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) {
    return;
  }
  if (errno != ENOTEMPTY && errno != EEXIST) {
    fail_at(to, "cannot be moved into place", errno);
  }
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    remove_tree(from);
    return;
  }
  if (errno != EINVAL && errno != ENOSYS) {
    fail_at(to, "cannot be exchanged with the older one", errno);
  }
  const std::string old = to + ".old.tmp";
  remove_tree(old);
  if (::rename(to.c_str(), old.c_str()) != 0 || ::rename(from.c_str(), to.c_str()) != 0) {
    fail_at(to, "cannot be moved into place", errno);
  }
  remove_tree(old);
}

}  // namespace hypershard::checkpoint::internal

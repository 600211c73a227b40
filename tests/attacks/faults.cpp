// Let the n-th call fail that writes to a file below a folder, as a full or broken disk does: for tests, by LD_PRELOAD.
//
//     faults_arm("/folder", n, errno)    the n-th matching call from now on fails once, and so do all later ones
//     faults_count()                     matching calls since then
//
// A match is open for writing, write, pwrite, writev, ftruncate, fsync, fdatasync, close, rename, mkdir of something
// below the folder. Libraries in any language call these of libc, which is why the fault is put there.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

static char folder[PATH_MAX];
static std::atomic<long> counted{0};
static long first = -1;
static long last = -1;
static int number = 0;

#define REAL(name) (reinterpret_cast<decltype(&name)>(dlsym(RTLD_NEXT, #name)))

static bool below(const char* path) {
  size_t length = strlen(folder);
  return length && path && !strncmp(path, folder, length);
}

static bool fails() {
  long mine = counted.fetch_add(1);
  if (first < 0 || mine < first || (last >= 0 && mine > last)) return false;
  errno = number;
  return true;
}

static bool of_file(int descriptor) {
  if (!folder[0] || descriptor < 3) return false;
  char name[64], path[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(name, path, sizeof path - 1);
  if (length <= 0) return false;
  path[length] = 0;
  return below(path);
}

static bool written_to(int descriptor) {
  return of_file(descriptor) && (fcntl(descriptor, F_GETFL) & O_ACCMODE) != O_RDONLY;
}

extern "C" {
void faults_arm(const char* below_folder, long begin, long end, int with_errno) {
  strncpy(folder, below_folder, sizeof folder - 1);
  first = begin;
  last = end;
  number = with_errno;
  counted = 0;
}
long faults_count() { return counted; }

ssize_t write(int fd, const void* data, size_t size) {
  if (written_to(fd) && fails()) return -1;
  return REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  if (written_to(fd) && fails()) return -1;
  return REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
  if (written_to(fd) && fails()) return -1;
  return REAL(pwrite64)(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec* data, int count) {
  if (written_to(fd) && fails()) return -1;
  return REAL(writev)(fd, data, count);
}
int ftruncate(int fd, off_t size) {
  if (written_to(fd) && fails()) return -1;
  return REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) {
  if (written_to(fd) && fails()) return -1;
  return REAL(ftruncate64)(fd, size);
}
int fsync(int fd) {
  if (of_file(fd) && fails()) return -1;
  return REAL(fsync)(fd);
}
int fdatasync(int fd) {
  if (of_file(fd) && fails()) return -1;
  return REAL(fdatasync)(fd);
}
int close(int fd) {
  if (written_to(fd) && fails()) {
    int kept = errno;
    REAL(close)(fd);
    errno = kept;
    return -1;
  }
  return REAL(close)(fd);
}
int rename(const char* from, const char* to) {
  if (below(to) && fails()) return -1;
  return REAL(rename)(from, to);
}
int mkdir(const char* path, mode_t mode) {
  if (below(path) && fails()) return -1;
  return REAL(mkdir)(path, mode);
}
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  if ((flags & O_ACCMODE) != O_RDONLY && below(path) && fails()) return -1;
  return REAL(open)(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  if ((flags & O_ACCMODE) != O_RDONLY && below(path) && fails()) return -1;
  return REAL(open64)(path, flags, mode);
}
int openat(int at, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  if ((flags & O_ACCMODE) != O_RDONLY && below(path) && fails()) return -1;
  return REAL(openat)(at, path, flags, mode);
}
}

// Let the n-th call fail that writes to a file below a folder, as full and broken disks and killed processes do: for
// tests, by LD_PRELOAD.
//
// The state lies in a file that the environment variable FAULTS_STATE names, mapped by every process that loads this
// library: the process that attacks writes it, and forked or started processes count together.
//
// Kinds of calls below the folder: 0 write, 1 flush (fsync), 2 close of what was written to, 3 name (rename, mkdir,
// link), 4 open for writing, 5 open for reading. Libraries in any language call these of libc, so the fault is put there.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

enum Kind { WRITE, FLUSH, CLOSE, NAME, OPEN, READ, KINDS };
enum How { FAIL, SHORT, SHORT_THEN_FAIL, KILL };

// The same layout stands in faults.py, as ctypes.Structure.
struct State {
  std::atomic<long> counted[KINDS];
  std::atomic<long> matched;
  long first;   // the match that fails, from 0; -1: none
  long last;    // -1: all later ones fail, too
  int kinds;    // bits of the kinds that match
  int number;   // errno
  int how;
  char folder[PATH_MAX];  // "" switches everything off
};

static State* state = nullptr;

__attribute__((constructor)) static void map_state() {
  const char* path = getenv("FAULTS_STATE");
  if (!path) return;
  int descriptor = ::open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return;
  void* found = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  if (found != MAP_FAILED) state = static_cast<State*>(found);
}

#define REAL(name) (reinterpret_cast<decltype(&name)>(dlsym(RTLD_NEXT, #name)))

static bool is_armed() { return state && state->folder[0]; }

static bool below(const char* path) {
  if (!is_armed() || !path) return false;
  char whole[PATH_MAX];
  if (path[0] != '/') {  // relative to the folder in which the process works
    if (!getcwd(whole, sizeof whole)) return false;
    size_t length = strlen(whole);
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    path = whole;
  }
  return !strncmp(path, state->folder, strlen(state->folder));
}

// Counts a call, and says whether it is one that fails.
static bool fails(Kind kind) {
  state->counted[kind].fetch_add(1);
  if (!(state->kinds >> kind & 1)) return false;
  long mine = state->matched.fetch_add(1);
  if (state->first < 0 || mine < state->first || (state->last >= 0 && mine > state->last)) return false;
  if (state->how == KILL && kind != WRITE) kill(getpid(), SIGKILL);
  errno = state->number;
  return true;
}

static bool of_file(int descriptor) {
  if (!is_armed() || descriptor < 3) return false;
  char name[64], path[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(name, path, sizeof path - 1);
  if (length <= 0 || path[0] != '/') return false;
  path[length] = 0;
  return below(path);
}

static bool written_to(int descriptor) {
  return of_file(descriptor) && (fcntl(descriptor, F_GETFL) & O_ACCMODE) != O_RDONLY;
}

// How many of so many bytes are written when the call fails: -1 for an error, all that are left for none.
static ssize_t short_of(size_t size) {
  if (state->how == FAIL || size < 2) return -1;
  return static_cast<ssize_t>(size / 2);
}

static void after_short() {
  if (state->how == KILL) kill(getpid(), SIGKILL);
  if (state->how == SHORT_THEN_FAIL) state->how = FAIL;
}

static bool opens(const char* path, int flags) {
  bool writes = (flags & O_ACCMODE) != O_RDONLY;
  return below(path) && fails(writes ? OPEN : READ);
}

extern "C" {
ssize_t write(int fd, const void* data, size_t size) {
  if (!written_to(fd) || !fails(WRITE)) return REAL(write)(fd, data, size);
  ssize_t part = short_of(size);
  ssize_t done = part < 0 ? -1 : REAL(write)(fd, data, part);
  if (part < 0) errno = state->number;
  after_short();
  return done;
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  if (!written_to(fd) || !fails(WRITE)) return REAL(pwrite)(fd, data, size, at);
  ssize_t part = short_of(size);
  ssize_t done = part < 0 ? -1 : REAL(pwrite)(fd, data, part, at);
  if (part < 0) errno = state->number;
  after_short();
  return done;
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) { return pwrite(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec* data, int count) {
  if (!written_to(fd) || !fails(WRITE)) return REAL(writev)(fd, data, count);
  ssize_t part = count ? short_of(data[0].iov_len) : -1;
  ssize_t done = part < 0 ? -1 : REAL(write)(fd, data[0].iov_base, part);
  if (part < 0) errno = state->number;
  after_short();
  return done;
}
ssize_t sendfile(int out, int in, off_t* at, size_t size) {
  if (written_to(out) && fails(WRITE)) {
    if (state->how == KILL) kill(getpid(), SIGKILL);
    return -1;
  }
  return REAL(sendfile)(out, in, at, size);
}
ssize_t sendfile64(int out, int in, off64_t* at, size_t size) { return sendfile(out, in, at, size); }
ssize_t copy_file_range(int in, off64_t* from, int out, off64_t* to, size_t size, unsigned flags) {
  if (written_to(out) && fails(WRITE)) {
    if (state->how == KILL) kill(getpid(), SIGKILL);
    return -1;
  }
  return REAL(copy_file_range)(in, from, out, to, size, flags);
}
int ftruncate(int fd, off_t size) {
  if (written_to(fd) && fails(NAME)) return -1;
  return REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int fsync(int fd) {
  if (of_file(fd) && fails(FLUSH)) return -1;
  return REAL(fsync)(fd);
}
int fdatasync(int fd) {
  if (of_file(fd) && fails(FLUSH)) return -1;
  return REAL(fdatasync)(fd);
}
int close(int fd) {
  if (written_to(fd) && fails(CLOSE)) {
    int kept = errno;
    REAL(close)(fd);
    errno = kept;
    return -1;
  }
  return REAL(close)(fd);
}
int rename(const char* from, const char* to) {
  if (below(to) && fails(NAME)) return -1;
  return REAL(rename)(from, to);
}
int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) {
  if (below(to) && fails(NAME)) return -1;
  return REAL(renameat2)(from_at, from, to_at, to, flags);
}
int mkdir(const char* path, mode_t mode) {
  if (below(path) && fails(NAME)) return -1;
  return REAL(mkdir)(path, mode);
}
int link(const char* from, const char* to) {
  if (below(to) && fails(NAME)) return -1;
  return REAL(link)(from, to);
}
int linkat(int from_at, const char* from, int to_at, const char* to, int flags) {
  if (below(to) && fails(NAME)) return -1;
  return REAL(linkat)(from_at, from, to_at, to, flags);
}
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  if (opens(path, flags)) return -1;
  return REAL(open)(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  if (opens(path, flags)) return -1;
  return REAL(open64)(path, flags, mode);
}
int openat(int at, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  if (opens(path, flags)) return -1;
  return REAL(openat)(at, path, flags, mode);
}
FILE* fopen(const char* path, const char* mode) {
  if (below(path) && fails(strpbrk(mode, "wa+") ? OPEN : READ)) return nullptr;
  return REAL(fopen)(path, mode);
}
FILE* fopen64(const char* path, const char* mode) {
  if (below(path) && fails(strpbrk(mode, "wa+") ? OPEN : READ)) return nullptr;
  return REAL(fopen64)(path, mode);
}
}

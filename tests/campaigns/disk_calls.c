/* Ends the process before its n-th call that changes a folder, or makes that call fail, or copies the folder.

   cc -shared -fPIC -O1 -o disk_calls.so disk_calls.c -ldl
   LD_PRELOAD=./disk_calls.so program

   Counts calls of all threads and libraries, also of those without Python. Nothing is counted before watch_calls. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_KINDS 65536

static atomic_long watching = 0, seen = 0;
static long at = 0, last = 0;
static int failure = 0;
static char below[PATH_MAX] = "";
static char kinds[MOST_KINDS + 1] = "";
static char copies[PATH_MAX] = "";
static pthread_mutex_t one_call = PTHREAD_MUTEX_INITIALIZER;
static __thread int inside = 0, held = 0;

/* Counts calls about what is below a folder: names, contents and what makes them durable. With an empty folder, calls
   about names and durability anywhere. The n-th call kills the process; if error is an errno, the calls from the n-th
   to the last fail with it instead. With n = 0 calls are counted only; with n = -1 not even that. */
void watch_calls(const char *folder, long n, long to, int error) {
    atomic_store(&watching, 0);
    strncpy(below, folder, PATH_MAX - 1);
    at = n, last = to, failure = error, *copies = 0;
    memset(kinds, 0, sizeof kinds);
    atomic_store(&seen, 0);
    atomic_store(&watching, n >= 0);
}

/* A letter for every call: n of a name, s that makes something durable, w that opens or writes a file. */
const char *calls_seen(void) { return kinds; }

/* As watch_calls, but nothing is killed: before each of the calls from the n-th to the last, the folder is copied to a
   folder in `into` that has the call's number for a name. One call is made at a time, so what is copied is what SIGKILL
   would leave. Starts no count of its own: call watch_calls with n = 0 before. */
void copy_at_calls(const char *into, long n, long to) {
    at = n, last = to;
    strncpy(copies, into, PATH_MAX - 1);
}

/* In a program that nobody else arms: KILL_AT_CALL=n, and KILL_BELOW=folder. */
__attribute__((constructor)) static void arm_from_environment(void) {
    const char *n = getenv("KILL_AT_CALL"), *folder = getenv("KILL_BELOW");
    if (n) watch_calls(folder ? folder : "", atol(n), 0, 0);
}

static int is_below(const char *path) {
    size_t length = strlen(below);
    return !strncmp(path, below, length) && (path[length] == 0 || path[length] == '/');
}

/* Where an open file is; empty if it is none. */
static void path_of(int file, char *path) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

static int counts(int folder, const char *name) {
    char path[2 * PATH_MAX] = "";
    if (!*below) return 1;
    if (!name || *name == '/') return name && is_below(name);
    if (folder != AT_FDCWD) path_of(folder, path);
    else if (!getcwd(path, PATH_MAX)) return 0;
    strcat(path, "/");
    strncat(path, name, PATH_MAX - 1);
    return is_below(path);
}

static void copy_file(const char *from, const char *to, const struct stat *about) {
    char bytes[1 << 16];
    int source = open(from, O_RDONLY), target = open(to, O_WRONLY | O_CREAT | O_TRUNC, about->st_mode);
    for (ssize_t size; (size = read(source, bytes, sizeof bytes)) > 0;)
        if (write(target, bytes, size) != size) abort();
    struct timespec times[2] = {about->st_atim, about->st_mtim};
    futimens(target, times);
    close(source), close(target);
}

static void copy_folder(const char *from, const char *to) {
    char source[PATH_MAX], target[PATH_MAX];
    DIR *folder = opendir(from);
    if (!folder) return;
    mkdir(to, 0777);
    for (struct dirent *entry; (entry = readdir(folder));) {
        struct stat about;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (snprintf(source, PATH_MAX, "%s/%s", from, entry->d_name) >= PATH_MAX) abort();
        if (snprintf(target, PATH_MAX, "%s/%s", to, entry->d_name) >= PATH_MAX) abort();
        if (lstat(source, &about)) continue;
        if (S_ISDIR(about.st_mode)) copy_folder(source, target);
        if (S_ISREG(about.st_mode)) copy_file(source, target, &about);
        if (S_ISLNK(about.st_mode)) {
            char link[PATH_MAX] = "";
            if (readlink(source, link, PATH_MAX - 1) < 0 || symlink(link, target)) abort();
        }
    }
    closedir(folder);
}

static void copy_before(long n) {
    char target[2 * PATH_MAX];
    if (n < at || n > last) return;
    inside = 1;
    snprintf(target, sizeof target, "%s/%ld", copies, n);
    copy_folder(below, target);
    inside = 0;
}

/* After a call that counted while folders are copied: the next one may be made. */
static void release(void) {
    if (held && !inside) held = 0, pthread_mutex_unlock(&one_call);
}

/* Whether the call is to fail. */
static int strike(char kind, const char *call, const char *what) {
    if (inside) return 0;
    if (*copies) held = 1, pthread_mutex_lock(&one_call);
    long n = atomic_fetch_add(&seen, 1) + 1;
    if (n <= MOST_KINDS) kinds[n - 1] = kind;
    if (*copies) return copy_before(n), 0;
    if (!at || n < at || (failure && n > last)) return 0;
    if (n == at) dprintf(2, "%s before call %ld: %s %s\n", failure ? "failure" : "killed", n, call, what);
    if (!failure) kill(getpid(), SIGKILL);
    errno = failure;
    return 1;
}

static int strike_name(char kind, const char *call, int folder, const char *name, int other, const char *to) {
    if (!atomic_load(&watching)) return 0;
    return (counts(folder, name) || (to && counts(other, to))) && strike(kind, call, name);
}

static int strike_file(const char *call, int file, int writes) {
    char path[PATH_MAX] = "";
    if (!atomic_load(&watching) || (writes && !*below)) return 0;
    path_of(file, path);
    return (!*below || is_below(path)) && strike(writes ? 'w' : 's', call, path);
}

#define NEXT(type, name, parameters)       \
    static type(*next) parameters;         \
    if (!next) next = dlsym(RTLD_NEXT, name);

#define NAMED(name, parameters, arguments, folder, path, other, to)                \
    int name parameters {                                                          \
        NEXT(int, #name, parameters)                                               \
        int result = strike_name('n', #name, folder, path, other, to) ? -1 : next arguments;  \
        release();                                                                 \
        return result;                                                             \
    }
#define FILED(type, name, writes, parameters, arguments)              \
    type name parameters {                                            \
        NEXT(type, #name, parameters)                                 \
        type result = strike_file(#name, d, writes) ? -1 : next arguments;   \
        release();                                                    \
        return result;                                                \
    }

NAMED(rename, (const char *a, const char *b), (a, b), AT_FDCWD, a, AT_FDCWD, b)
NAMED(renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), d, a, e, b)
NAMED(renameat2, (int d, const char *a, int e, const char *b, unsigned f), (d, a, e, b, f), d, a, e, b)
NAMED(unlink, (const char *a), (a), AT_FDCWD, a, 0, 0)
NAMED(unlinkat, (int d, const char *a, int f), (d, a, f), d, a, 0, 0)
NAMED(remove, (const char *a), (a), AT_FDCWD, a, 0, 0)
NAMED(rmdir, (const char *a), (a), AT_FDCWD, a, 0, 0)
NAMED(mkdir, (const char *a, mode_t m), (a, m), AT_FDCWD, a, 0, 0)
NAMED(mkdirat, (int d, const char *a, mode_t m), (d, a, m), d, a, 0, 0)
NAMED(link, (const char *a, const char *b), (a, b), AT_FDCWD, b, 0, 0)
NAMED(linkat, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f), e, b, 0, 0)
NAMED(symlink, (const char *a, const char *b), (a, b), AT_FDCWD, b, 0, 0)
NAMED(symlinkat, (const char *a, int d, const char *b), (a, d, b), d, b, 0, 0)
NAMED(truncate, (const char *a, off_t n), (a, n), AT_FDCWD, a, 0, 0)
NAMED(truncate64, (const char *a, off64_t n), (a, n), AT_FDCWD, a, 0, 0)

FILED(int, fsync, 0, (int d), (d))
FILED(int, fdatasync, 0, (int d), (d))
FILED(int, ftruncate, 0, (int d, off_t n), (d, n))
FILED(int, ftruncate64, 0, (int d, off64_t n), (d, n))
FILED(ssize_t, write, 1, (int d, const void *b, size_t n), (d, b, n))
FILED(ssize_t, pwrite, 1, (int d, const void *b, size_t n, off_t o), (d, b, n, o))
FILED(ssize_t, pwrite64, 1, (int d, const void *b, size_t n, off64_t o), (d, b, n, o))
FILED(ssize_t, writev, 1, (int d, const struct iovec *v, int n), (d, v, n))
FILED(ssize_t, sendfile, 1, (int d, int e, off_t *o, size_t n), (d, e, o, n))
FILED(ssize_t, sendfile64, 1, (int d, int e, off64_t *o, size_t n), (d, e, o, n))

static int opens_to_write(const char *call, int folder, const char *path, int flags) {
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) || !*below) return 0;
    return strike_name('w', call, folder, path, 0, 0);
}

#define MODE(flags)                                     \
    mode_t mode = 0;                                    \
    if (flags & (O_CREAT | __O_TMPFILE)) {              \
        va_list more;                                   \
        va_start(more, flags);                          \
        mode = va_arg(more, mode_t);                    \
        va_end(more);                                   \
    }
#define OPEN(name)                                                                              \
    int name(const char *path, int flags, ...) {                                                \
        NEXT(int, #name, (const char *, int, ...))                                              \
        MODE(flags)                                                                             \
        int file = opens_to_write(#name, AT_FDCWD, path, flags) ? -1 : next(path, flags, mode); \
        release();                                                                              \
        return file;                                                                            \
    }
#define OPENAT(name)                                                                            \
    int name(int folder, const char *path, int flags, ...) {                                    \
        NEXT(int, #name, (int, const char *, int, ...))                                         \
        MODE(flags)                                                                             \
        int file = opens_to_write(#name, folder, path, flags) ? -1 : next(folder, path, flags, mode); \
        release();                                                                              \
        return file;                                                                            \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

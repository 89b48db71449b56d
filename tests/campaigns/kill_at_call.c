/* Ends the process with SIGKILL just before its n-th call that changes a folder or makes a file durable.

   cc -shared -fPIC -O1 -o kill_at_call.so kill_at_call.c -ldl
   LD_PRELOAD=./kill_at_call.so program

   Counts calls of all threads and libraries. Nothing is counted before arm_kill(n); with n = 0 nothing is killed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long armed = -1, seen = 0;

void arm_kill(long n) { atomic_store(&seen, 0); atomic_store(&armed, n); }
long calls_seen(void) { return atomic_load(&seen); }

/* Armed by KILL_AT_CALL=n in the environment, where nobody calls arm_kill. */
__attribute__((constructor)) static void arm_from_environment(void) {
    const char *n = getenv("KILL_AT_CALL");
    if (n) arm_kill(atol(n));
}

static void count(void) {
    long n = atomic_load(&armed);
    if (n >= 0 && atomic_fetch_add(&seen, 1) + 1 == n) kill(getpid(), SIGKILL);
}

#define CALL(name, parameters, arguments)                  \
    int name parameters {                                  \
        static int(*next) parameters;                      \
        if (!next) next = dlsym(RTLD_NEXT, #name);         \
        count();                                           \
        return next arguments;                             \
    }

CALL(rename, (const char *a, const char *b), (a, b))
CALL(renameat, (int d, const char *a, int e, const char *b), (d, a, e, b))
CALL(renameat2, (int d, const char *a, int e, const char *b, unsigned f), (d, a, e, b, f))
CALL(fsync, (int d), (d))
CALL(fdatasync, (int d), (d))
CALL(unlink, (const char *a), (a))
CALL(unlinkat, (int d, const char *a, int f), (d, a, f))
CALL(remove, (const char *a), (a))
CALL(rmdir, (const char *a), (a))
CALL(mkdir, (const char *a, mode_t m), (a, m))
CALL(mkdirat, (int d, const char *a, mode_t m), (d, a, m))
CALL(link, (const char *a, const char *b), (a, b))
CALL(linkat, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f))
CALL(symlink, (const char *a, const char *b), (a, b))
CALL(symlinkat, (const char *a, int d, const char *b), (a, d, b))
CALL(ftruncate, (int d, off_t n), (d, n))

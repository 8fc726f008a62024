/* Preloaded into a redis-server: an fsync takes four seconds while the file named by SLOW_FSYNC is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static int slowly(const char *name, int file) {
    int (*sync)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    for (int i = 0; i < 40 && access(getenv("SLOW_FSYNC"), F_OK) == 0; i++) usleep(100000);
    return sync(file);
}

int fsync(int file) { return slowly("fsync", file); }
int fdatasync(int file) { return slowly("fdatasync", file); }

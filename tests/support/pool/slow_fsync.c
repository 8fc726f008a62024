/* Preloaded into a redis-server: an fsync takes as many milliseconds as the file named by SLOW_FSYNC says. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static long wanted_ms(void) {
    long ms = 0;
    FILE *file = fopen(getenv("SLOW_FSYNC"), "r");
    if (file == NULL) return 0;
    if (fscanf(file, "%ld", &ms) != 1) ms = 0;
    fclose(file);
    return ms;
}

/* The file is read again and again, so that a disk that gets well ends the fsync under way. */
static int slowly(const char *name, int file) {
    int (*sync)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    for (long passed_ms = 0; passed_ms < wanted_ms(); passed_ms += 10) usleep(10000);
    return sync(file);
}

int fsync(int file) { return slowly("fsync", file); }
int fdatasync(int file) { return slowly("fdatasync", file); }

/* Preloaded into a node's processes: a wall clock that is off, of which the kernel has one for all namespaces.

It is OFF_S seconds off; without that, as many as the 8 bytes of the file say that $WALL_CLOCK names, and whoever writes
others there lets the clock of all these processes step. What is shown is shifted, and times to wait until, which were
made of it, are shifted back. Other clocks stay.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define FIRST_WALL_S 1000000000 /* no machine has been up for as long: the times before are of monotonic clocks */

#ifndef OFF_S
static const volatile long unmoved, *step = &unmoved;
#define OFF_S (*step)

__attribute__((constructor)) static void open_clock(void) {
    const char *name = getenv("WALL_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) step = mapped;
    close(file);
}
#endif

static struct timespec kernels(const struct timespec *shown) {
    struct timespec time = *shown;
    time.tv_sec -= OFF_S;
    return time;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next(clock, time);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += OFF_S;
    return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    static int (*next)(struct timeval *restrict, void *restrict);
    if (!next) next = dlsym(RTLD_NEXT, "gettimeofday");
    int failed = next(time, zone);
    if (!failed) time->tv_sec += OFF_S;
    return failed;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    if (until->tv_sec < FIRST_WALL_S) return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
    struct timespec time = kernels(until);
    return pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &time);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    struct timespec time = kernels(until);
    return sem_clockwait(semaphore, CLOCK_REALTIME, &time);
}

long syscall(long number, ...) { /* futexes of libraries that have their own locks, as Ray's */
    static long (*next)(long, ...);
    if (!next) next = dlsym(RTLD_NEXT, "syscall");
    long given[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) given[i] = va_arg(arguments, long);
    va_end(arguments);
    struct timespec time;
    if (number == SYS_futex && given[1] & FUTEX_CLOCK_REALTIME && given[3]) {
        time = kernels((const struct timespec *)given[3]);
        given[3] = (long)&time;
    }
    return next(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

/* Threads that share the outputs of a large product, or the heads of attention. Each output is still summed up by one
   thread, in one order, so that no bit depends on the number of threads.

   Threads other than the caller's poll for work for tens of microseconds or more. This is longer than the time between
   two products of a layer. Then they sleep. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

/* Does items [first, last) of a job. Thread 0 is the caller's. */
typedef void (*part_t)(const void *job, int64_t first, int64_t last, int64_t thread);

enum { MOST_THREADS = 256, LOOKS = 4000 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t threads[MOST_THREADS];
    atomic_flag is_busy;
    atomic_int call, num_working, num_asleep;
    int num_threads, is_over;
    part_t part;
    const void *job;
    int64_t num_items;
} team = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .is_busy = ATOMIC_FLAG_INIT, .num_threads = 1};

static inline void look_again(int num_looks) {
    if (num_looks > LOOKS) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static void do_part(int64_t thread) {
    const int64_t n = team.num_items, size = team.num_threads;
    team.part(team.job, n * thread / size, n * (thread + 1) / size, thread);
}

/* Wait until the number of calls is no longer `seen`, and return it. */
static int next_call(int seen) {
    for (int looks = 0; looks < LOOKS; looks++) {
        if (atomic_load(&team.call) != seen) return atomic_load(&team.call);
        look_again(looks);
    }
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.num_asleep, 1);
    while (atomic_load(&team.call) == seen) pthread_cond_wait(&team.wake, &team.lock);
    atomic_fetch_sub(&team.num_asleep, 1);
    pthread_mutex_unlock(&team.lock);
    return atomic_load(&team.call);
}

static void call_team(void) {
    atomic_fetch_add(&team.call, 1);
    if (atomic_load(&team.num_asleep) == 0) return;
    pthread_mutex_lock(&team.lock);
    pthread_cond_broadcast(&team.wake);
    pthread_mutex_unlock(&team.lock);
}

static void *work(void *argument) {
    const int64_t thread = (int64_t)argument;
    for (int seen = 0;;) {
        seen = next_call(seen);
        if (team.is_over) return NULL;
        do_part(thread);
        atomic_fetch_sub(&team.num_working, 1);
    }
}

/* Do all items of a job. Each thread does an equal share. With a single item, or if another caller uses the
   threads, the caller does all. */
static void share(part_t part, const void *job, int64_t num_items) {
    if (team.num_threads == 1 || num_items < 2 || atomic_flag_test_and_set(&team.is_busy)) {
        part(job, 0, num_items, 0);
        return;
    }
    team.part = part, team.job = job, team.num_items = num_items;
    atomic_store(&team.num_working, team.num_threads - 1);
    call_team();
    do_part(0);
    for (int looks = 0; atomic_load(&team.num_working) > 0; looks++) look_again(looks);
    atomic_flag_clear(&team.is_busy);
}

/* For the child process after fork, in which the other threads do not exist. */
static void forget_team(void) {
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.wake, NULL);
    atomic_store(&team.call, 0), atomic_store(&team.num_asleep, 0);
    atomic_flag_clear(&team.is_busy);
    team.num_threads = 1;
}

/* Let `num_threads` threads share the work from now on, and return how many there are: fewer if the system refuses
   some. No other caller may compute meanwhile. */
static int64_t resize_team(int64_t num_threads) {
    static int is_watched = 0;
    if (!is_watched) is_watched = pthread_atfork(NULL, NULL, forget_team) == 0;
    const int wanted = !is_watched || num_threads < 1 ? 1 : num_threads < MOST_THREADS ? (int)num_threads : MOST_THREADS;
    if (wanted == team.num_threads) return wanted;
    while (atomic_flag_test_and_set(&team.is_busy)) sched_yield();
    team.is_over = 1;
    call_team();
    for (int i = 1; i < team.num_threads; i++) pthread_join(team.threads[i], NULL);
    team.is_over = 0, team.num_threads = 1;
    atomic_store(&team.call, 0);
    while (team.num_threads < wanted &&
           pthread_create(&team.threads[team.num_threads], NULL, work, (void *)(int64_t)team.num_threads) == 0)
        team.num_threads++;
    atomic_flag_clear(&team.is_busy);
    return team.num_threads;
}

/* Threads take tasks from a queue, the oldest first. One mutex guards pool and tasks. */
#define _GNU_SOURCE /* signal masks, names of threads */
#include "thread_pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

enum { STACK_SIZE = 256 * 1024 }; /* conversions call nothing that needs more */

struct thread_pool {
    pthread_mutex_t mutex;
    pthread_cond_t queued, done;
    struct task *first, *last;
    int queued_count;
    int notified;
    bool is_closing;
    int thread_count;
    pthread_t threads[];
};

static void
append(struct thread_pool *pool, struct task *task)
{
    task->previous = pool->last;
    task->next = NULL;
    if (pool->last != NULL)
        pool->last->next = task;
    else
        pool->first = task;
    pool->last = task;
    pool->queued_count++;
}

static void
unlink_task(struct thread_pool *pool, struct task *task)
{
    if (task->previous != NULL)
        task->previous->next = task->next;
    else
        pool->first = task->next;
    if (task->next != NULL)
        task->next->previous = task->previous;
    else
        pool->last = task->previous;
    pool->queued_count--;
    task->state = TASK_RUNNING;
}

static void
set_done(struct thread_pool *pool, struct task *task)
{
    task->state = TASK_DONE;
    pthread_cond_broadcast(&pool->done);
    if (task->notifies && write(pool->notified, "", 1) < 0) {
        /* The descriptor is full, so a notification is on its way; or nobody reads it. */
    }
}

static void *
run_tasks(void *argument)
{
    struct thread_pool *pool = argument;
#ifdef __linux__
    pthread_setname_np(pthread_self(), "offload"); /* top -H and others show it */
#endif
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (pool->first == NULL && !pool->is_closing)
            pthread_cond_wait(&pool->queued, &pool->mutex);
        struct task *task = pool->first;
        if (task == NULL)
            break;
        unlink_task(pool, task);
        pthread_mutex_unlock(&pool->mutex);
        task->run(task);
        pthread_mutex_lock(&pool->mutex);
        set_done(pool, task);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static int
start_threads(struct thread_pool *pool, int threads)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return error;
    pthread_attr_setstacksize(&attributes, STACK_SIZE);
    /* Signals are for the threads of Python. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (error == 0 && pool->thread_count < threads) {
        error = pthread_create(&pool->threads[pool->thread_count], &attributes, run_tasks, pool);
        pool->thread_count += error == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

struct thread_pool *
pool_new(int threads, int notified)
{
    struct thread_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof(pthread_t));
    if (pool == NULL)
        return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->queued, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->notified = dup(notified);
    int error = pool->notified < 0 ? errno : start_threads(pool, threads);
    if (error != 0) {
        pool_free(pool);
        errno = error;
        return NULL;
    }
    return pool;
}

void
pool_submit(struct thread_pool *pool, struct task *task)
{
    pthread_mutex_lock(&pool->mutex);
    task->state = TASK_QUEUED;
    append(pool, task);
    pthread_cond_signal(&pool->queued);
    pthread_mutex_unlock(&pool->mutex);
}

bool
pool_take(struct thread_pool *pool, struct task *task)
{
    pthread_mutex_lock(&pool->mutex);
    bool is_queued = task->state == TASK_QUEUED;
    if (is_queued)
        unlink_task(pool, task);
    pthread_mutex_unlock(&pool->mutex);
    return is_queued;
}

struct task *
pool_take_newest(struct thread_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    struct task *task = pool->last;
    if (task != NULL)
        unlink_task(pool, task);
    pthread_mutex_unlock(&pool->mutex);
    return task;
}

void
pool_run(struct thread_pool *pool, struct task *task)
{
    task->run(task);
    pthread_mutex_lock(&pool->mutex);
    set_done(pool, task);
    pthread_mutex_unlock(&pool->mutex);
}

int
pool_queued(struct thread_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    int queued = pool->queued_count;
    pthread_mutex_unlock(&pool->mutex);
    return queued;
}

bool
pool_is_done(struct thread_pool *pool, struct task *task)
{
    pthread_mutex_lock(&pool->mutex);
    bool is_done = task->state == TASK_DONE;
    pthread_mutex_unlock(&pool->mutex);
    return is_done;
}

bool
pool_notify(struct thread_pool *pool, struct task *task)
{
    pthread_mutex_lock(&pool->mutex);
    bool is_done = task->state == TASK_DONE;
    task->notifies = true;
    pthread_mutex_unlock(&pool->mutex);
    return !is_done;
}

void
pool_wait(struct thread_pool *pool, struct task *task)
{
    pthread_mutex_lock(&pool->mutex);
    while (task->state == TASK_RUNNING)
        pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

void
pool_free(struct thread_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->is_closing = true;
    pthread_cond_broadcast(&pool->queued);
    pthread_mutex_unlock(&pool->mutex);
    for (int index = 0; index < pool->thread_count; index++)
        pthread_join(pool->threads[index], NULL);
    pthread_cond_destroy(&pool->queued);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->mutex);
    if (pool->notified >= 0)
        close(pool->notified);
    free(pool);
}

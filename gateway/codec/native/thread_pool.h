/* Threads that run tasks, and know nothing of Python. */
#ifndef THREAD_POOL_H
#define THREAD_POOL_H

#include <stdbool.h>

enum task_state { TASK_QUEUED, TASK_RUNNING, TASK_DONE };

/* What a thread runs. The pool uses all fields but ``run``; its owner zeroes them. */
struct task {
    void (*run)(struct task *);
    struct task *previous, *next; /* in the queue */
    enum task_state state;
    bool notifies;
};

struct thread_pool;

/*
 * Start threads. A byte is written to a duplicate of the descriptor ``notified``, which must not
 * block, when a task is done of which pool_notify was told. Return NULL with errno set if anything
 * fails.
 */
struct thread_pool *pool_new(int threads, int notified);

/* Queue a task, whose memory must stay until it is done or was taken. */
void pool_submit(struct thread_pool *pool, struct task *task);

/* The number of tasks that no thread has begun. */
int pool_queued(struct thread_pool *pool);

/* Take a task from the queue; false if a thread has begun it. */
bool pool_take(struct thread_pool *pool, struct task *task);

/* Take the newest task, which threads would begin last; NULL if there is none. */
struct task *pool_take_newest(struct thread_pool *pool);

/* Run a task that was taken. */
void pool_run(struct thread_pool *pool, struct task *task);

bool pool_is_done(struct thread_pool *pool, struct task *task);

/* Have the end of a task notified; false if it is done already. */
bool pool_notify(struct thread_pool *pool, struct task *task);

/* Wait for a task that a thread has begun. */
void pool_wait(struct thread_pool *pool, struct task *task);

/* End the threads after the tasks that they run, and free the pool. The queue must be empty. */
void pool_free(struct thread_pool *pool);

#endif

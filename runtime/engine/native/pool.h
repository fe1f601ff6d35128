// A team of threads that walks through a step's phases together, without a system call between phases.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ __volatile__("" ::: "memory")
#endif

class Pool {
   public:
    explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
        for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { work(i); });
    }

    ~Pool() {
        stop_ = true;
        advance(epoch_, sleeping_);
        for (auto& worker : workers_) worker.join();
    }

    int threads() const { return threads_; }

    // Runs job(thread) on every thread of the team; returns when all are done.
    void run(const std::function<void(int)>& job) {
        if (threads_ > 1) {
            job_ = &job;
            advance(epoch_, sleeping_);
        }
        job(0);
        barrier();
    }

    // Inside a job, called by all threads alike: shares units [0, count) among them as each gets free, then waits for
    // all. A thread that lost its core to another process holds up one unit, not its share of them.
    template <class F>
    void each(int count, const F& f) {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
        barrier();
    }

    void barrier() {
        uint32_t turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            advance(turn_, waiting_);
            return;
        }
        await(turn_, waiting_, turn);
    }

   private:
    void work(int thread) {
        for (uint32_t seen = 0;;) {
            await(epoch_, sleeping_, seen);
            seen++;
            if (stop_) return;
            (*job_)(thread);
            barrier();
        }
    }

    static void advance(std::atomic<uint32_t>& word, std::atomic<int>& sleepers) {
        word.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst))
            syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    // Waits until word is no longer `seen`. Phases are short and the next step is near, so first a short spin. Not a long
    // one: where another process has taken a thread's core, that thread can go on as soon as ours is left idle.
    static void await(std::atomic<uint32_t>& word, std::atomic<int>& sleepers, uint32_t seen) {
        for (int spins = 0; spins < SPINS; spins++) {
            if (word.load(std::memory_order_acquire) != seen) return;
            PAUSE();
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (word.load(std::memory_order_seq_cst) == seen)
            syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }

    static constexpr int SPINS = 500;
    const int threads_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleeping_{0}, waiting_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
};

// A team of threads that walks through a step's phases together, without a system call between phases.
#pragma once
#include <linux/futex.h>
#include <sched.h>
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
        announce();
        for (auto& worker : workers_) worker.join();
    }

    int threads() const { return threads_; }

    // Runs job(thread) on every thread of the team; returns when all are done.
    void run(const std::function<void(int)>& job) {
        if (threads_ > 1) {
            job_ = &job;
            announce();
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
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; spins++) {
            PAUSE();
            if (spins > 4000) sched_yield();  // its core may be what the last one waits for
        }
    }

   private:
    void announce() {
        epoch_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst))
            syscall(SYS_futex, (uint32_t*)&epoch_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void work(int thread) {
        for (uint32_t seen = 0;;) {
            seen = await(seen);
            if (stop_) return;
            (*job_)(thread);
            barrier();
        }
    }

    // The next step often follows within the spin; an idle engine sleeps.
    uint32_t await(uint32_t seen) {
        for (int spins = 0; spins < 2000; spins++) {
            if (epoch_.load(std::memory_order_acquire) != seen) return epoch_.load(std::memory_order_acquire);
            PAUSE();
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (epoch_.load(std::memory_order_seq_cst) == seen)
            syscall(SYS_futex, (uint32_t*)&epoch_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        return epoch_.load(std::memory_order_acquire);
    }

    const int threads_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
};

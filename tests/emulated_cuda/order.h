// The order of operations, as far as it is known: vector clocks of streams, events and the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

// For each stream, by its number: how many of its operations are known to have finished.
using Clock = std::vector<int64_t>;

inline int64_t reached(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

// An operation's access to a range of bytes of a block.
struct Access {
  int stream;
  int64_t number;  // position among the operations of its stream
  bool writes;
  size_t begin, end;
  std::string op;
  int64_t site;  // the place in the code that called the operation
};

// Memory of a device, or pinned memory of the host (device -1).
struct Block {
  char* data;
  size_t size;
  int device;
  int owner;  // the stream of the allocation, which may reuse the memory when it is freed
  std::vector<Access> accesses;
  std::set<int> recorded;  // streams that were passed to record_stream
  int64_t run = 0;  // number of the `with` block in which the memory was allocated
};

struct Freed {
  size_t size;
  std::vector<Access> unfinished;
  int64_t site;
};

// A finding that tests can query. For a race, `other_*` describes the earlier access.
struct Finding {
  std::string kind;  // race, overwritten, free, sync, copy
  std::string op;
  int device = -1;
  int64_t stream = 0;
  int64_t site = -1;
  std::string other_op;
  int other_device = -1;
  int64_t other_stream = 0;
  int64_t other_site = -1;
  int64_t bytes = 0;
  bool pinned = false;
  bool waited = false;  // whether the host waited for the device
  bool writes = false, other_writes = false;
};

struct Event {
  Clock clock;
  int stream = 0;
  bool queried = false;
};

// An asynchronous copy to pinned memory, whose bytes arrive when the host has waited for them.
struct CopyToPinned {
  int stream;
  int64_t number;
  char* to;
  std::vector<char> bytes;
};

// An asynchronous copy from pinned memory, whose bytes must not change until it has finished.
struct CopyFromPinned {
  int stream;
  int64_t number;
  const char* from;
  std::vector<char> bytes;
  int64_t site;
};

class Order {
 public:
  std::mutex lock;  // held by callers of the methods below, but never while waiting for Python's GIL
  std::vector<Finding> findings;

  int number_of(int device, int64_t id) {
    auto [found, made] = numbers_.try_emplace({device, id}, static_cast<int>(names_.size()));
    if (made) {
      names_.push_back({device, id});
      clocks_.emplace_back();
      issued_.push_back(0);
      queried_at_.push_back(-1);
      freed_.emplace_back();
    }
    return found->second;
  }

  // Issues the next operation of a stream, after everything that the stream and the host have waited for.
  int64_t issue(int stream) {
    auto& clock = clocks_[stream];
    join(clock, host_);
    if (static_cast<int>(clock.size()) <= stream) clock.resize(stream + 1, 0);
    return clock[stream] = ++issued_[stream];
  }

  Clock now(int stream) const {
    Clock clock = clocks_[stream];
    join(clock, host_);
    return clock;
  }

  void wait(int stream, const Clock& clock) { join(clocks_[stream], clock); }

  void host_waits(const Clock& clock) {
    join(host_, clock);
    complete_copies();
  }

  void host_waits_for_device(int device) {
    for (size_t i = 0; i < names_.size(); ++i)
      if (names_[i].first == device) join(host_, clocks_[i]);
    complete_copies();
  }

  // The first query of unfinished work returns false, since a real device lags behind the host; the second one waits.
  bool query(Event& event) {
    if (all_finished(event.clock)) return true;
    if (!std::exchange(event.queried, true)) return false;
    host_waits(event.clock);
    return true;
  }

  bool query(int stream) {
    const Clock clock = now(stream);
    if (all_finished(clock)) return true;
    if (std::exchange(queried_at_[stream], issued_[stream]) != issued_[stream]) return false;
    host_waits(clock);
    return true;
  }

  // Compares an access with earlier accesses, and keeps the accesses that later ones must be compared with.
  void record_access(Block& block, const Access& access) {
    auto& all = block.accesses;
    for (const auto& earlier : all) {
      const bool overlap = earlier.begin < access.end && access.begin < earlier.end;
      if (overlap && (earlier.writes || access.writes) && !has_finished(earlier, access.stream)) record_race(access, earlier, block);
    }
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& earlier) {
      const bool within = access.begin <= earlier.begin && earlier.end <= access.end;
      return within && (access.writes || (earlier.stream == access.stream && !earlier.writes));
    }), all.end());
    all.push_back(access);
  }

  // An allocation on this stream may reuse memory that was freed on this stream. Reports operations on other streams
  // that may still use the freed memory.
  void allocated_on(int stream) {
    for (const auto& freed : freed_[stream])
      for (const auto& use : freed.unfinished) {
        if (reached(host_, use.stream) >= use.number || has_finished(use, stream)) continue;
        Finding found;
        found.kind = "free";
        found.op = use.op, found.device = names_[use.stream].first, found.stream = names_[use.stream].second;
        found.site = use.site, found.writes = use.writes, found.bytes = freed.size;
        found.other_op = "free", found.other_device = names_[stream].first, found.other_stream = names_[stream].second, found.other_site = freed.site;
        findings.push_back(found);
      }
    freed_[stream].clear();
  }

  // Returns accesses from other streams that may be unfinished when a block is freed, except from streams that were
  // passed to record_stream.
  std::vector<Access> unfinished(const Block& block) const {
    std::vector<Access> uses;
    for (const auto& use : block.accesses)
      if (!block.recorded.count(use.stream) && reached(host_, use.stream) < use.number && !has_finished(use, block.owner))
        uses.push_back(use);
    return uses;
  }

  void freed(const Block& block, std::vector<Access> uses, int64_t site) {
    if (!uses.empty()) freed_[block.owner].push_back({block.size, std::move(uses), site});
  }

  void add_copy_to_pinned(CopyToPinned copy) { copies_to_pinned_.push_back(std::move(copy)); }
  void add_copy_from_pinned(CopyFromPinned copy) { copies_from_pinned_.push_back(std::move(copy)); }

  // Completes copies to pinned memory that a stream is about to access. An unordered copy is reported as a race.
  void deliver_within(const char* begin, size_t size) {
    take_if(copies_to_pinned_, [&](const CopyToPinned& one) { return begin < one.to + one.bytes.size() && one.to < begin + size; },
         [](const CopyToPinned& one) { std::memcpy(one.to, one.bytes.data(), one.bytes.size()); });
  }

  void check_within(const char* begin, size_t size) {
    take_if(copies_from_pinned_, [&](const CopyFromPinned& one) { return begin < one.from + one.bytes.size() && one.from < begin + size; },
         [&](const CopyFromPinned& one) { check(one); });
  }

  void forget_within(const char* begin, size_t size) {
    take_if(copies_to_pinned_, [&](const CopyToPinned& one) { return begin <= one.to && one.to < begin + size; }, [](const CopyToPinned&) {});
    check_within(begin, size);
  }

  // At the end of the `with` block, completes all copies and forgets freed blocks.
  void close() {
    for (const auto& clock : clocks_) join(host_, clock);
    complete_copies();
    for (auto& each : freed_) each.clear();
  }

  std::pair<int, int64_t> name_of(int stream) const { return names_[stream]; }

 private:
  std::map<std::pair<int, int64_t>, int> numbers_;
  std::vector<std::pair<int, int64_t>> names_;
  std::vector<Clock> clocks_;  // by stream: what its next operation waits for
  Clock host_;                 // what the host has waited for; all threads share it, and their order is not tracked
  std::vector<int64_t> issued_, queried_at_;
  std::vector<std::vector<Freed>> freed_;
  std::vector<CopyToPinned> copies_to_pinned_;
  std::vector<CopyFromPinned> copies_from_pinned_;

  bool has_finished(const Access& earlier, int stream) const {
    return earlier.stream == stream || reached(clocks_[stream], earlier.stream) >= earlier.number;
  }

  bool all_finished(const Clock& clock) const {
    for (size_t i = 0; i < clock.size(); ++i)
      if (clock[i] > reached(host_, static_cast<int>(i))) return false;
    return true;
  }

  template <typename T, typename Predicate, typename Action>
  static void take_if(std::vector<T>& from, Predicate selects, Action act) {
    auto kept = std::stable_partition(from.begin(), from.end(), [&](const T& one) { return !selects(one); });
    std::vector<T> taken(std::make_move_iterator(kept), std::make_move_iterator(from.end()));
    from.erase(kept, from.end());
    for (const auto& one : taken) act(one);
  }

  // Completes the copies that the host has waited for, and checks that the sources of copies to devices are unchanged.
  void complete_copies() {
    take_if(copies_from_pinned_, [&](const CopyFromPinned& one) { return reached(host_, one.stream) >= one.number; }, [&](const CopyFromPinned& one) { check(one); });
    take_if(copies_to_pinned_, [&](const CopyToPinned& one) { return reached(host_, one.stream) >= one.number; },
         [](const CopyToPinned& one) { std::memcpy(one.to, one.bytes.data(), one.bytes.size()); });
  }

  void check(const CopyFromPinned& one) {
    if (std::memcmp(one.from, one.bytes.data(), one.bytes.size()) == 0) return;
    Finding found;
    found.kind = "overwritten", found.op = "copy_";
    found.device = names_[one.stream].first, found.stream = names_[one.stream].second;
    found.site = one.site, found.bytes = one.bytes.size(), found.pinned = true;
    findings.push_back(found);
  }

  void record_race(const Access& access, const Access& earlier, const Block& block) {
    Finding found;
    found.kind = "race";
    found.op = access.op, found.stream = names_[access.stream].second, found.site = access.site, found.writes = access.writes;
    found.other_op = earlier.op, found.other_device = names_[earlier.stream].first;
    found.other_stream = names_[earlier.stream].second, found.other_site = earlier.site;
    found.other_writes = earlier.writes;
    found.device = names_[access.stream].first, found.pinned = block.device < 0;
    found.bytes = std::min(access.end, earlier.end) - std::max(access.begin, earlier.begin);
    findings.push_back(found);
  }
};

inline Order& order() {
  static auto* one = new Order;  // never freed, so that it outlives all tensors
  return *one;
}

}  // namespace emulated

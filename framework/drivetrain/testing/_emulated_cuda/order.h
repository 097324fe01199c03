// Which operation is known to be over before which: vector clocks over streams, events and the host.
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

// By the number of a stream: how many of its operations are known to be over.
using Clock = std::vector<int64_t>;

inline int64_t reached(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

// What one operation of a stream does to a range of bytes of a block.
struct Access {
  int stream;
  int64_t number;  // among the operations of its stream
  bool writes;
  size_t begin, end;
  std::string op;
  int64_t site;  // where the host called it
};

// Memory of a device, or pinned memory of the host (device -1).
struct Block {
  char* data;
  size_t size;
  int device;
  int owner;  // the stream that it was allocated on, and that may get it again when it is freed
  std::vector<Access> accesses;
  std::set<int> recorded;  // the streams that record_stream named
  int64_t run = 0;  // which `with` it was allocated in
};

struct Freed {
  size_t size;
  std::vector<Access> unfinished;
  int64_t site;
};

// What tests ask for. A race has two sides; `other_*` is the earlier one.
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
  bool waited = false;  // the host did, for the device
  bool writes = false, other_writes = false;
};

struct Event {
  Clock clock;
  int stream = 0;
  bool asked = false;
};

// An asynchronous copy to pinned memory: the bytes that come when the host has waited for them.
struct Arriving {
  int stream;
  int64_t number;
  char* to;
  std::vector<char> bytes;
};

// An asynchronous copy from pinned memory: the bytes that must not change until it is over.
struct Leaving {
  int stream;
  int64_t number;
  const char* from;
  std::vector<char> bytes;
  int64_t site;
};

class Order {
 public:
  std::mutex lock;  // held by whoever calls what follows; never while Python's lock is waited for
  std::vector<Finding> findings;

  int number_of(int device, int64_t id) {
    auto [found, made] = numbers_.try_emplace({device, id}, static_cast<int>(names_.size()));
    if (made) {
      names_.push_back({device, id});
      clocks_.emplace_back();
      issued_.push_back(0);
      asked_.push_back(-1);
      freed_.emplace_back();
    }
    return found->second;
  }

  // The next operation of a stream comes after all that the stream and the host have waited for.
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
    settle();
  }

  void host_waits_for_device(int device) {
    for (size_t i = 0; i < names_.size(); ++i)
      if (names_[i].first == device) join(host_, clocks_[i]);
    settle();
  }

  // A device is always a little behind: asked the first time, it has not come so far yet.
  bool ask(Event& event) {
    if (over(event.clock)) return true;
    if (!std::exchange(event.asked, true)) return false;
    host_waits(event.clock);
    return true;
  }

  bool ask(int stream) {
    const Clock clock = now(stream);
    if (over(clock)) return true;
    if (std::exchange(asked_[stream], issued_[stream]) != issued_[stream]) return false;
    host_waits(clock);
    return true;
  }

  // Compares an access with those before it, and keeps what later ones are to be compared with.
  void touch(Block& block, const Access& access) {
    auto& all = block.accesses;
    for (const auto& earlier : all) {
      const bool overlap = earlier.begin < access.end && access.begin < earlier.end;
      if (overlap && (earlier.writes || access.writes) && !is_over(earlier, access.stream)) tell_race(access, earlier, block);
    }
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& earlier) {
      const bool within = access.begin <= earlier.begin && earlier.end <= access.end;
      return within && (access.writes || (earlier.stream == access.stream && !earlier.writes));
    }), all.end());
    all.push_back(access);
  }

  // Whoever gets memory of this stream may get what was freed there, whether others are through with it or not.
  void allocated_on(int stream) {
    for (const auto& freed : freed_[stream])
      for (const auto& use : freed.unfinished) {
        if (reached(host_, use.stream) >= use.number || is_over(use, stream)) continue;
        Finding found;
        found.kind = "free";
        found.op = use.op, found.device = names_[use.stream].first, found.stream = names_[use.stream].second;
        found.site = use.site, found.writes = use.writes, found.bytes = freed.size;
        found.other_op = "free", found.other_device = names_[stream].first, found.other_stream = names_[stream].second, found.other_site = freed.site;
        findings.push_back(found);
      }
    freed_[stream].clear();
  }

  // What other streams may still do to a block that is given back, but for those that its allocator knows of.
  std::vector<Access> unfinished(const Block& block) const {
    std::vector<Access> uses;
    for (const auto& use : block.accesses)
      if (!block.recorded.count(use.stream) && reached(host_, use.stream) < use.number && !is_over(use, block.owner))
        uses.push_back(use);
    return uses;
  }

  void freed(const Block& block, std::vector<Access> uses, int64_t site) {
    if (!uses.empty()) freed_[block.owner].push_back({block.size, std::move(uses), site});
  }

  void arrives(Arriving copy) { arriving_.push_back(std::move(copy)); }
  void leaves(Leaving copy) { leaving_.push_back(std::move(copy)); }

  // A stream reads or writes pinned memory: earlier copies to it are over by then (else it is a race, and told).
  void deliver_within(const char* begin, size_t size) {
    take(arriving_, [&](const Arriving& one) { return begin < one.to + one.bytes.size() && one.to < begin + size; },
         [](const Arriving& one) { std::memcpy(one.to, one.bytes.data(), one.bytes.size()); });
  }

  void check_within(const char* begin, size_t size) {
    take(leaving_, [&](const Leaving& one) { return begin < one.from + one.bytes.size() && one.from < begin + size; },
         [&](const Leaving& one) { check(one); });
  }

  void forget_within(const char* begin, size_t size) {
    take(arriving_, [&](const Arriving& one) { return begin <= one.to && one.to < begin + size; }, [](const Arriving&) {});
    check_within(begin, size);
  }

  // After `with`: what is under way is over, and what was freed is forgotten.
  void close() {
    for (const auto& clock : clocks_) join(host_, clock);
    settle();
    for (auto& each : freed_) each.clear();
  }

  std::pair<int, int64_t> name_of(int stream) const { return names_[stream]; }

 private:
  std::map<std::pair<int, int64_t>, int> numbers_;
  std::vector<std::pair<int, int64_t>> names_;
  std::vector<Clock> clocks_;  // by stream: what its next operation comes after
  Clock host_;                 // what the host has waited for; one for all its threads, whose own order nobody sees
  std::vector<int64_t> issued_, asked_;
  std::vector<std::vector<Freed>> freed_;
  std::vector<Arriving> arriving_;
  std::vector<Leaving> leaving_;

  bool is_over(const Access& earlier, int stream) const {
    return earlier.stream == stream || reached(clocks_[stream], earlier.stream) >= earlier.number;
  }

  bool over(const Clock& clock) const {
    for (size_t i = 0; i < clock.size(); ++i)
      if (clock[i] > reached(host_, static_cast<int>(i))) return false;
    return true;
  }

  template <typename T, typename Which, typename Then>
  static void take(std::vector<T>& from, Which which, Then then) {
    auto kept = std::stable_partition(from.begin(), from.end(), [&](const T& one) { return !which(one); });
    std::vector<T> taken(std::make_move_iterator(kept), std::make_move_iterator(from.end()));
    from.erase(kept, from.end());
    for (const auto& one : taken) then(one);
  }

  // What the host has just waited for has come, and what it had lent is its own again.
  void settle() {
    take(leaving_, [&](const Leaving& one) { return reached(host_, one.stream) >= one.number; }, [&](const Leaving& one) { check(one); });
    take(arriving_, [&](const Arriving& one) { return reached(host_, one.stream) >= one.number; },
         [](const Arriving& one) { std::memcpy(one.to, one.bytes.data(), one.bytes.size()); });
  }

  void check(const Leaving& one) {
    if (std::memcmp(one.from, one.bytes.data(), one.bytes.size()) == 0) return;
    Finding found;
    found.kind = "overwritten", found.op = "copy_";
    found.device = names_[one.stream].first, found.stream = names_[one.stream].second;
    found.site = one.site, found.bytes = one.bytes.size(), found.pinned = true;
    findings.push_back(found);
  }

  void tell_race(const Access& access, const Access& earlier, const Block& block) {
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
  static auto* one = new Order;  // outlives every tensor
  return *one;
}

}  // namespace emulated

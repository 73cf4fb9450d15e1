// Chooses the splits of a decode launch by a small cost model. The constants are a fit to times on an H200 (1 to 256
// requests, 512 to 4096 slots, 1 to 32 splits); they rank the candidates, the times themselves are rough.
#include "decode_plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace skv {
namespace {

constexpr int kDepths[] = {12, 8, 6, 5, 4};
constexpr double kStartNs = 2700;           // lengths, table, first slots
constexpr double kLatencyNs = 1400;         // device memory, loaded
constexpr double kBytesPerNs = 40;          // a multiprocessor's share of the bandwidth when all are busy
constexpr double kPlaceNs = 500;            // what a warp spends on one place of its ring
constexpr double kCombineNs = 1900;         // counter, fence, and the first read of another split's result
constexpr double kCombinePerSplitNs = 60;
constexpr double kLogitBytesPerNs = 5;      // scores from the logits of all splits, by the last CTA

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }

struct Sizes {
  int64_t pairs;          // CTAs per split
  int64_t slot_bytes;     // K and V of one slot
  int32_t tile_rows;
  int32_t min_depth;
  int32_t max_resident;   // CTAs per multiprocessor that the registers allow
};

struct Candidate {
  int32_t num_splits = 0;
  int32_t depth = 0;
  int64_t warp_slots = 0;
  int64_t shared_bytes = 0;
  double ns = 0;
};

Sizes sizes_of(const DecodeParams& p, bool is_step) {
  const int32_t rows = p.group * p.num_rows;
  Sizes s{};
  s.tile_rows = rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
  s.pairs = int64_t{p.batch} * p.kv_heads * div_up(rows, s.tile_rows);
  s.slot_bytes = int64_t{4} * p.head_dim;
  // A warp's ring later holds its fp32 output tile, rows padded by 4.
  s.min_depth = s.tile_rows == 16 && p.head_dim == 128 ? 5 : 4;
  s.max_resident = s.tile_rows == 16 ? 3 : 4;
  return s;
}

/// The most CTAs per multiprocessor that are of use, then the deepest ring that they leave room for. Returns the CTAs
/// per multiprocessor; 0 when not even one fits.
int64_t fit_ring(const Sizes& s, const DeviceFacts& device, int64_t ctas, int64_t logits_bytes, Candidate& c) {
  const int64_t static_bytes = 1024;   // more than the kernel's own static arrays
  const int64_t wanted = std::min<int64_t>(s.max_resident, div_up(ctas, device.num_multiprocessors));
  for (int64_t resident = wanted; resident > 0; --resident) {
    const int64_t available = std::min<int64_t>(
        device.shared_per_multiprocessor / resident - device.shared_reserved, device.shared_per_block);
    for (const int depth : kDepths) {
      const int64_t bytes = int64_t{depth} * kPlaceBytes * kDecodeWarps + logits_bytes;
      if (depth < s.min_depth || bytes + static_bytes > available) continue;
      c.depth = depth;
      c.shared_bytes = bytes;
      return resident;
    }
  }
  return 0;
}

/// Nanoseconds per byte of one multiprocessor: Little's law, the bandwidth and the arithmetic, as a smooth maximum.
double ns_per_byte(const DeviceFacts& device, int64_t ctas, int64_t resident, int32_t depth) {
  const double busy = std::min<double>(1.0, static_cast<double>(ctas) / device.num_multiprocessors);
  const double place_bytes = static_cast<double>(kPlaceBytes * kDecodeWarps);
  const double latency = kLatencyNs / (resident * (depth - 2) * place_bytes);
  const double bandwidth = busy / kBytesPerNs;
  const double arithmetic = kPlaceNs / (resident * place_bytes);
  return std::cbrt(std::pow(latency, 3) + std::pow(bandwidth, 3) + std::pow(arithmetic, 3));
}

/// Time and shared memory of one number of splits; `ns` is negative when it does not fit.
Candidate evaluate(const DecodeParams& p, bool is_step, const Sizes& s, const DeviceFacts& device, int32_t splits) {
  Candidate c{};
  c.num_splits = splits;
  const int64_t slots = round_up(div_up(p.max_length, splits), split_granule_of(p.head_dim));
  c.warp_slots = is_step ? slots / kDecodeWarps : kChunkSlots;
  const int64_t ctas = s.pairs * splits;
  const int64_t resident = fit_ring(s, device, ctas, c.warp_slots * kDecodeWarps * s.tile_rows * 4, c);
  c.ns = -1;
  if (resident == 0) return c;
  // A last, partly filled round costs about half of what it leaves idle: its CTAs have the bandwidth to themselves.
  const int64_t slice = device.num_multiprocessors * resident;
  const double rounds = ctas <= slice ? 1.0 : 0.5 * (static_cast<double>(ctas) / slice + div_up(ctas, slice));
  const double bytes = static_cast<double>(resident * slots * s.slot_bytes);
  c.ns = rounds * (kStartNs + bytes * ns_per_byte(device, ctas, resident, c.depth));
  if (splits > 1) {
    const double logits_bytes = is_step ? static_cast<double>(p.max_length) * s.tile_rows * 4 : 0;
    c.ns += rounds * (kCombineNs + kCombinePerSplitNs * splits + logits_bytes / kLogitBytesPerNs);
    c.ns += 2 * logits_bytes * s.pairs / (kBytesPerNs * device.num_multiprocessors);   // written and read once
  }
  return c;
}

Candidate choose(const DecodeParams& p, bool is_step, bool may_split, const Sizes& s, const DeviceFacts& device) {
  if (p.num_splits > 0) return evaluate(p, is_step, s, device, p.num_splits);
  const int32_t most = may_split && s.pairs <= kDecodeCounters ? kDecodeMaxSplits : 1;
  Candidate best{};
  best.ns = -1;
  int64_t last_slots = 0;
  for (int32_t splits = 1; splits <= most; ++splits) {
    const int64_t slots = round_up(div_up(p.max_length, splits), split_granule_of(p.head_dim));
    if (slots == last_slots) continue;  // the same ranges, and empty ones
    last_slots = slots;
    const Candidate c = evaluate(p, is_step, s, device, splits);
    if (c.ns >= 0 && (best.ns < 0 || c.ns < best.ns)) best = c;
  }
  return best;
}

}  // namespace

DecodePlan plan_decode(const DecodeParams& p, bool is_step, bool may_split, const DeviceFacts& device) {
  const Sizes s = sizes_of(p, is_step);
  const Candidate c = choose(p, is_step, may_split, s, device);
  if (c.ns < 0) {
    throw std::runtime_error("decode: " + std::to_string(p.max_length) + " slots with " + std::to_string(p.group) +
                             " query heads per KV head do not fit this GPU's shared memory; ask for more splits");
  }
  if (c.num_splits > 1 && s.pairs > kDecodeCounters) {
    throw std::runtime_error("decode: batch x KV heads x row blocks is " + std::to_string(s.pairs) +
                             ", splits are possible up to " + std::to_string(kDecodeCounters));
  }
  DecodePlan plan{};
  plan.num_splits = c.num_splits;
  plan.ring_depth = c.depth;
  plan.warp_slots = static_cast<int32_t>(c.warp_slots);
  plan.tile_rows = s.tile_rows;
  plan.row_blocks = static_cast<int32_t>(div_up(p.group * p.num_rows, s.tile_rows));
  plan.shared_bytes = c.shared_bytes;
  const int64_t parts = c.num_splits > 1 ? s.pairs * c.num_splits * s.tile_rows : 0;
  plan.partial_lse_offset = 2 * kDecodeCounters * 4;
  plan.partial_out_offset = plan.partial_lse_offset + parts * 4;
  plan.logits_offset = plan.partial_out_offset + parts * p.head_dim * 4;
  const bool keeps_logits = is_step && c.num_splits > 1;
  plan.workspace_bytes = plan.logits_offset + (keeps_logits ? s.pairs * p.max_length * s.tile_rows * 4 : 0);
  return plan;
}

}  // namespace skv

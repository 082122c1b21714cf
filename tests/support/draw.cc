// SPDX-License-Identifier: MIT
#include "tests/support/draw.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <sstream>
#include <variant>

#include "coterie/random.h"
#include "coterie/spec.h"

namespace coterie::test {
namespace {

using cases::Case;
using cases::Data;
using cases::Layout;
using cases::Lengths;
using Index = std::int64_t;

// The random draws of one problem.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : stream_{seed, RandomUse::data, 555} {}
  Index below(Index bound) {
    return random_below(stream_, index_++, static_cast<std::uint32_t>(bound));
  }
  Index between(Index low, Index high) { return low + below(high - low + 1); }
  // Log-uniform.
  Index about(Index low, Index high) {
    const double unit = random_unit(stream_.at(index_++).word[0]);
    const auto top = static_cast<double>(high + 1), bottom = static_cast<double>(low);
    return std::min(high, static_cast<Index>(bottom * std::pow(top / bottom, unit)));
  }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T among(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<Index>(values.size()))];
  }

 private:
  RandomStream stream_;
  std::uint64_t index_ = 0;
};

// A spec's text, key by key.
class SpecText {
 public:
  explicit SpecText(const char* name) : text_(name) {}
  template <class Value>
  SpecText& add(const char* key, const Value& value) {
    text_ += (first_ ? "(" : ",");
    std::ostringstream number;
    number << std::boolalpha << value;
    text_ += std::string(key) + "=" + number.str();
    first_ = false;
    return *this;
  }
  std::string str() const { return first_ ? text_ : text_ + ")"; }

 private:
  std::string text_;
  bool first_ = true;
};

// Upper limits of parameters. CUDA kernels support up to 128 top keys.
struct Most {
  Index rows, clusters, window, topk, stride, chunk;
};
constexpr Most kCpu{300, 200, 200, 300, 60, 40}, kGpu{20000, 600, 2048, 128, 3000, 300};
const Most& most_of(Form form) { return form == Form::cpu ? kCpu : kGpu; }

void draw_clustering(Draw& draw, const Most& most, SpecText& spec) {
  const auto* method = draw.among({"keys", "hamming-keys", "hamming"});
  spec.add("clusters", draw.about(1, most.clusters));
  spec.add("clustering", method);
  if (draw.chance(50)) spec.add("iterations", draw.between(0, 4));
  if (std::string(method) != "keys" && draw.chance(50)) spec.add("bits", draw.between(1, 63));
  if (std::string(method) == "hamming") spec.add("hash_bias", draw.chance(50));
}

// Blocks of near keys, of self-attention only; kernels on GPUs take multiples of 16.
void draw_near(Draw& draw, const Most& most, Case& c, SpecText& spec) {
  const bool gpu = most.rows > 1000;
  spec.add("near", gpu ? 16 * draw.about(1, 32) : draw.about(1, 100));
  c.S = c.N;
}

void draw_routing(Draw& draw, const Most& most, Case& c) {
  SpecText spec("routing");
  // The tolerance rule does not cover sums over a hundred clusters of a token.
  spec.add("clusters", draw.about(1, most.rows < 1000 ? 40 : most.clusters));
  const bool shared = draw.chance(50);
  if (shared) spec.add("share_qk", true);
  const int form = static_cast<int>(draw.below(4));  // top, paper, balanced, strict
  c.causal = form == 1 || form == 3;
  if (form == 1) spec.add("causal", "paper");
  if (form == 2) {
    spec.add("membership", "balanced");
  } else {
    spec.add("window", draw.about(1, most.window));
  }
  if (form == 3) spec.add("queries_in", draw.chance(50) ? 1 : draw.between(1, 5));
  if (form == 3 && !shared) spec.add("include_self", draw.chance(50));
  if (draw.chance(50)) spec.add("self", draw.among({"keep", "demote"}));
  if (form < 2 && draw.chance(30)) spec.add("count_eps", draw.among({0.0, 0.5}));
  c.logit_scale = draw.chance(40);
  c.spec = spec.str();
  if (shared || form == 3) c.S = c.N;
}

void draw_cast(Draw& draw, const Most& most, Case& c) {
  // The specification's weights cost clusters times pairs.
  const Index clusters = draw.about(1, most.rows < 1000 ? 16 : most.clusters);
  SpecText spec("cast");
  const bool single = draw.chance(50);
  const Index fair = (c.N + clusters - 1) / clusters;
  spec.add("clusters", clusters);
  spec.add("size",
           single ? fair + draw.below(5) : draw.about(1, std::min<Index>(most.window, 700)));
  spec.add("mode", single ? "single" : "topk");
  if (draw.chance(40)) spec.add("activation", "laplace");
  if (draw.chance(40)) spec.add("heads", "separate");
  if (draw.chance(30)) spec.add("gate_scale", false);
  c.spec = spec.str();
  c.S = c.N;
}

void draw_mechanism(Draw& draw, Index mechanism, const Most& most, Case& c) {
  switch (mechanism) {
    case 0:
      c.spec = "full";
      c.causal = draw.chance(50);
      break;
    case 1: {
      SpecText spec("local");
      spec.add("window", draw.about(1, most.window));
      if (draw.chance(50)) spec.add("kind", "blocked").add("flange", draw.below(4));
      c.spec = spec.str();
      c.causal = draw.chance(50);
      break;
    }
    case 2:
      c.spec = SpecText("strided").add("stride", draw.about(1, most.stride)).str();
      c.causal = draw.chance(50);
      break;
    case 3:
      c.spec = SpecText("oracle-top").add("topk", draw.about(1, most.topk)).str();
      c.causal = draw.chance(50);
      break;
    case 4: {
      SpecText spec("clustered");
      draw_clustering(draw, most, spec);
      if (draw.chance(50)) draw_near(draw, most, c, spec);
      c.spec = spec.str();
      break;
    }
    case 5: {
      SpecText spec("i-clustered");
      draw_clustering(draw, most, spec);
      spec.add("topk", draw.about(1, most.topk));
      const int form = static_cast<int>(draw.below(10));
      c.causal = form < 3;
      if (form < 6) spec.add("mass_grad", draw.chance(50));
      if (c.causal) spec.add("causal", "reference");
      if (form >= 6) draw_near(draw, most, c, spec);
      c.spec = spec.str();
      break;
    }
    case 6:
      c.spec = SpecText("lsh")
                   .add("rounds", draw.between(1, 5))
                   .add("chunk", draw.about(1, most.chunk))
                   .add("buckets", 2 * draw.about(1, most.chunk / 2))
                   .add("combine", draw.among({"lse", "mean"}))
                   .str();
      c.causal = draw.chance(50);
      c.S = c.N;
      break;
    case 7:
      draw_routing(draw, most, c);
      break;
    default:
      draw_cast(draw, most, c);
  }
}

Data draw_data(Draw& draw) {
  return draw.among({Data::normal,    Data::normal,   Data::mixture,     Data::mixture,
                     Data::equal,     Data::integers, Data::one_cluster, Data::spread,
                     Data::disjoint,  Data::disjoint, Data::sparse,      Data::zipf,
                     Data::zipf,      Data::repeated, Data::zeros,       Data::large,
                     Data::huge,      Data::trained,  Data::trained,     Data::nonfinite,
                     Data::nonfinite, Data::nonfinite});
}

void draw_shape(Draw& draw, Form form, Case& c) {
  const Index rows = most_of(form).rows;
  c.lengths = draw.among({Lengths::none, Lengths::none, Lengths::padded, Lengths::packed,
                          Lengths::drawn, Lengths::drawn});
  c.layout = draw.among({Layout::bhnd, Layout::bnhd, Layout::gaps});
  c.B = c.lengths == Lengths::packed ? 1 : draw.between(1, 4);
  const Index least = c.lengths == Lengths::packed ? 24 : 1;
  c.N = draw.about(least, rows);
  c.S = draw.chance(50) ? c.N : draw.about(least, rows);
  if (form == Form::cpu) {
    c.dtype = draw.among({DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16});
    c.Hkv = draw.between(1, 2);
    c.H = c.Hkv * draw.between(1, 3);
    c.Dk = draw.chance(10) ? 129 : draw.between(1, 40);
    c.Dv = draw.chance(50) ? c.Dk : draw.between(1, 40);
  } else {
    c.dtype =
        draw.among({DType::bf16, DType::bf16, DType::bf16, DType::f16, DType::f16, DType::f32});
    c.Hkv = draw.among<Index>({1, 2, 3, 4, 8});
    c.H = c.Hkv * draw.among<Index>({1, 1, 1, 2, 3, 4});
    c.Dk = draw.among<Index>(
        {32, 64, 64, 64, 128, 128, 16, 48, 96, 8, draw.between(1, 128), draw.between(1, 128)});
    c.Dv = c.Dk;
  }
}

double number(Index value) { return static_cast<double>(value); }

// Pairs of query and key of one item and head, plus the cost of selections and gathers.
double pairs_of(const FullParams&, const Case& c) { return number(c.N) * number(c.S); }
double pairs_of(const LocalParams& p, const Case& c) {
  const Index blocks = p.kind == LocalKind::blocked ? 2 * p.flange + 1 : 1;
  return number(c.N) * number(std::min(c.S, p.window * blocks));
}
double pairs_of(const StridedParams& p, const Case& c) {
  return number(c.N) * number(c.S / p.stride + 1);
}
double pairs_of(const OracleTopParams& p, const Case& c) {
  return number(c.N) * number(std::min(c.S, p.topk + 64));
}
double pairs_of(const ClusteredParams& p, const Case& c) {
  return number(p.clustering.clusters) * number(c.S) +
         number(c.N) * number(std::min(c.S, 3 * p.near));
}
double pairs_of(const ImprovedClusteredParams& p, const Case& c) {
  return number(p.clustering.clusters) * number(c.S) +
         number(c.N) * number(std::min(c.S, p.topk + 3 * p.near));
}
double pairs_of(const LshParams& p, const Case& c) {
  return number(c.N) * number(p.rounds) * number(std::min(c.S, 2 * p.chunk + 16));
}
double pairs_of(const RoutingParams& p, const Case& c) {
  const double selection = number(c.N) * number(p.clusters) / 4;
  if (p.membership == Membership::balanced)
    return selection + number(c.N) * number(c.S / p.clusters + 1);
  if (c.causal && p.causal == Causality::automatic)
    return selection + number(c.N) * number(std::min(c.S, p.window)) *
                           number(std::min(p.queries_in, p.clusters));
  return selection +
         number(p.clusters) * number(std::min(c.N, p.window)) * number(std::min(c.S, p.window));
}
double pairs_of(const CastParams& p, const Case& c) {
  const double size = number(std::min(c.N, p.size)), clusters = number(p.clusters);
  return clusters * size * size + 2 * number(c.N) * clusters;
}

// Whether the work, forward and backward, takes the specification about 20 ms (Form::cpu) or a CPU
// with 16 cores a quarter of a second (Form::gpu), with a limit on the elements of a tensor.
bool fits(const Case& c, Form form) {
  const double elements = static_cast<double>(c.B * c.H * std::max(c.N, c.S) * c.Dk);
  if (form == Form::gpu)
    return work_of(c) <= (c.dtype == DType::f32 ? 1e8 : 4e8) && elements <= 4e6;
  double dense = static_cast<double>(c.B * c.H * c.N * c.S * (c.Dk + c.Dv));
  const Mechanism mechanism = AttentionSpec::parse(c.spec).groups.at(0).mechanism;
  if (const auto* cast = std::get_if<CastParams>(&mechanism))
    dense *= static_cast<double>(cast->clusters);
  return dense <= 2e6;
}

// Fewer heads and batch entries, then rows, until it fits.
void shrink(Form form, Case& c) {
  while (!fits(c, form)) {
    if (c.H > c.Hkv) {
      c.H = c.Hkv;
    } else if (c.Hkv > 1) {
      c.H = c.Hkv = c.Hkv / 2;
    } else if (c.B > 1) {
      --c.B;
    } else if (c.N == c.S) {
      c.N = c.S = std::max<Index>(24, c.N * 3 / 4);
      if (c.N == 24) return;
    } else {
      Index& larger = c.N > c.S ? c.N : c.S;
      larger = std::max<Index>(24, larger * 3 / 4);
      if (larger == 24) return;
    }
  }
}

}  // namespace

double work_of(const Case& c) {
  const Mechanism mechanism = AttentionSpec::parse(c.spec).groups.at(0).mechanism;
  const double pairs =
      std::visit([&](const auto& params) { return pairs_of(params, c); }, mechanism);
  return pairs * static_cast<double>(c.B * c.H * c.Dk);
}

Case draw_case(std::uint64_t seed, Form form) {
  Draw draw(seed);
  Case c;
  c.name = "seed_" + std::to_string(seed);
  draw_shape(draw, form, c);
  c.data = draw_data(draw);
  // Two normalised elements are +-1: ties that rounding decides, in the specification too.
  if (form == Form::cpu && seed % 9 >= 7) c.Dk = std::max<Index>(c.Dk, 4);
  draw_mechanism(draw, static_cast<Index>(seed % 9), most_of(form), c);
  shrink(form, c);
  if (seed % 9 < 4 && c.N * c.S <= (1 << 22)) c.mask = draw.chance(30);
  if (draw.chance(40)) c.scale = draw.among({0.05, 0.5, 1.0, 3.0, -0.2, -1.0});
  if (seed % 9 == 7 && draw.chance(70))
    c.scale = 0.3;  // smaller logits than with routing's default scale
  if (draw.chance(30)) c.dropout = draw.among({0.1, 0.1, 0.3, 0.5, 0.9});
  c.part = draw.chance(20);
  return cases::completed(c);
}

std::vector<Case> known_hangs() {
  const char* separate = "routing(clusters=64,window=256,share_qk=false)";
  const auto make = [](const char* name, const std::string& spec, const char* shape) {
    return cases::make_case(name, spec, shape);
  };
  return {
      make("disjoint_clusters", separate, "B1 H32 N4096 D64 causal bf16 disjoint"),
      make("wide_rows", separate, "B1 H32 N4096 D128 causal bf16"),
      make("grouped_heads", separate, "B1 H32:8 N4096 D64 causal bf16"),
      make("trained_rows", "routing(clusters=32,window=256,share_qk=false)",
           "B2 H8 N2048 D64 causal bf16 trained"),
      make("trained_paper", "routing(clusters=32,window=256,causal=paper)",
           "B4 H8 N2048 D64 causal bf16 trained"),
      make("disjoint_paper", "routing(clusters=32,window=256,causal=paper)",
           "B4 H8 N2048 D64 causal bf16 disjoint"),
      make("disjoint_f16", separate, "B1 H8 N4096 D128 causal f16 disjoint"),
      make("one_cluster", separate, "B1 H8 N4096 D64 causal bf16 one_cluster"),
      make("huge_full", "full", "B1 H2 N512 D64 bf16 huge scale=0.125"),
      make("huge_full_causal", "full", "B1 H2 N512 D64 causal f16 huge scale=0.125"),
      make("huge_local", "local(window=128)", "B1 H2 N1024 D64 causal bf16 huge scale=0.125"),
      make("huge_routing", separate, "B1 H2 N1024 D64 causal bf16 huge"),
  };
}

std::string describe(const Case& c) {
  std::ostringstream text;
  text << c.spec << " B" << c.B << " H" << c.H << ":" << c.Hkv << " N" << c.N << " S" << c.S << " D"
       << c.Dk << ":" << c.Dv << " " << dtype_name(c.dtype) << (c.causal ? " causal" : "")
       << (c.mask ? " mask" : "") << (c.logit_scale ? " logit_scale" : "");
  constexpr const char* kLengths[] = {"", " padded", " packed", " drawn"};
  constexpr const char* kLayouts[] = {"", " bnhd", " gaps"};
  text << kLengths[static_cast<int>(c.lengths)] << kLayouts[static_cast<int>(c.layout)] << " "
       << cases::data_name(c.data);
  if (c.scale != 0.0) text << " scale=" << c.scale;
  if (c.part) text << " part";
  if (c.dropout != 0.0) text << " dropout=" << c.dropout;
  return text.str();
}

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace coterie::test

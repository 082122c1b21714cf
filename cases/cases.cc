// SPDX-License-Identifier: MIT
#include "cases/cases.h"

#include <charconv>
#include <map>
#include <ostream>
#include <sstream>

#include "coterie/error.h"

namespace coterie::cases {
namespace {

struct Line {
  const char *name, *spec, *shape;
};

constexpr Line kFull[] = {
    {"full_one_token", "full", "N1 D1"},
    {"full_one_key", "full", "N65 S1 D8"},
    {"full_one_query", "full", "N1 S700 D33:8"},
    {"full_one_query_padded_bf16", "full", "B3 H4:2 N1 S900 D64 causal padded bf16"},
    {"full_one_query_f16", "full", "N1 S65 D96 bnhd f16"},
    {"full_two_queries", "full", "N2 S65 D8"},
    {"full_f64", "full", "N63 D32 f64"},
    {"full_causal_bf16", "full", "D64 causal bnhd bf16"},
    {"full_padded_f16", "full", "B3 N65 D96 padded f16"},
    {"full_causal_padded_grouped", "full", "B3 H4:2 N113 causal padded gaps"},
    {"full_packed", "full", "B1 N129 D64:32 packed"},
    {"full_packed_even_f16", "full", "B1 H4:2 N129 D64 packed f16"},
    {"full_causal_packed_f64", "full", "B1 H1 N200 D129 causal packed f64"},
    {"full_cross_causal_prefix", "full", "N65 S113 causal"},
    {"full_cross_causal_more_queries", "full", "N113 S65 D8 causal"},
    {"full_cross_padded", "full", "B4 H4:1 N63 S129 D8:33 padded bnhd"},
    {"full_cross_packed_causal", "full", "B1 N113 S200 D16 causal packed"},
    {"full_masked_causal", "full", "N65 D8 causal mask"},
    {"full_masked_padded_f16", "full", "B3 H4:1 N64 mask padded f16"},
    {"full_equal_tokens", "full", "equal"},
    {"full_integers", "full", "N63 D8 integers scale=0.5"},
    {"full_mixture_scaled", "full", "H1 N200 D64 mixture scale=0.3"},
    {"full_long_rows", "full", "B1 H1 N129 S200 D129:96 gaps"},
    {"full_long_causal", "full", "B1 H1 N300 D8 causal"},
};

constexpr Line kLocal[] = {
    {"local_even_window", "local(window=8)", "N65 D8"},
    {"local_one_query", "local(window=300)", "H4:1 N1 S700 D8 causal"},
    {"local_odd_window", "local(window=5)", "N63 f64"},
    {"local_window_one", "local(window=1)", "N2 D8"},
    {"local_window_beyond_length", "local(window=1000)", "N113 D8"},
    {"local_causal", "local(window=16)", "N129 D64 causal bnhd"},
    {"local_causal_packed_grouped", "local(window=7)", "B1 H4:2 N200 D16:24 causal packed gaps"},
    {"local_causal_bf16", "local(window=33)", "N113 causal bf16"},
    {"local_padded_f16", "local(window=20)", "B3 N65 padded f16"},
    {"local_cross_causal", "local(window=12)", "N63 S113 D8 causal"},
    {"local_cross_more_queries", "local(window=12)", "N113 S64 D8"},
    {"local_masked", "local(window=9)", "N64 D8 mask"},
    {"local_blocked", "local(window=16,kind=blocked)", "N113 D8"},
    {"local_blocked_causal", "local(window=16,kind=blocked)", "N129 causal"},
    {"local_blocked_alone", "local(window=10,kind=blocked,flange=0)", "B3 N65 D8 causal padded"},
    {"local_blocked_wide_packed", "local(window=8,kind=blocked,flange=2)",
     "B1 N129 D8 packed bf16"},
    {"local_blocked_masked", "local(window=32,kind=blocked)", "N65 D8 causal mask"},
    {"local_long_window", "local(window=170)", "B1 H1 N300 D8 causal"},
};

constexpr Line kStrided[] = {
    {"strided_causal", "strided(stride=7)", "N113 causal"},
    {"strided_both_ways", "strided(stride=8)", "N64 D8 bnhd"},
    {"strided_one", "strided(stride=1)", "N63 D8 causal"},
    {"strided_beyond_length", "strided(stride=500)", "N65 D8"},
    {"strided_padded_grouped_f16", "strided(stride=5)", "B3 H4:2 N65 padded f16"},
    {"strided_packed_bf16", "strided(stride=3)", "B1 N129 D32:8 causal packed gaps bf16"},
    {"strided_packed_even", "strided(stride=3)", "B1 N129 D32 causal packed"},
    {"strided_masked_f64", "strided(stride=2)", "N65 D8 mask f64"},
    {"strided_cross_causal", "strided(stride=6)", "N63 S113 D8 causal"},
    {"strided_long", "strided(stride=2)", "B1 H1 N300 D8"},
};

constexpr Line kOracle[] = {
    {"oracle_top", "oracle-top(topk=8)", "N113"},
    {"oracle_top_one_key", "oracle-top(topk=1)", "N65 D8"},
    {"oracle_top_beyond_length", "oracle-top(topk=300)", "N63 D8 f64"},
    {"oracle_top_causal_padded", "oracle-top(topk=5)", "B3 H4:2 N65 causal padded"},
    {"oracle_top_packed", "oracle-top(topk=16)", "B1 N129 D64:8 packed bnhd bf16"},
    {"oracle_top_packed_even", "oracle-top(topk=16)", "B1 H4:2 N129 D64 causal packed bf16"},
    {"oracle_top_tied", "oracle-top(topk=9)", "N64 D8 integers"},
    {"oracle_top_equal_tokens", "oracle-top(topk=4)", "N65 D8 causal equal"},
    {"oracle_top_masked", "oracle-top(topk=6)", "N63 D8 causal mask gaps"},
    {"oracle_top_cross_causal_f16", "oracle-top(topk=10)", "N113 S65 D8 causal f16"},
    {"oracle_top_long_tied", "oracle-top(topk=7)", "B1 H2:1 N33 S700 D4 integers"},
    {"oracle_top_long", "oracle-top(topk=140)", "B1 H2:1 N33 S900 D8"},
};

constexpr Line kClustered[] = {
    {"clustered", "clustered(clusters=8)", "N113"},
    {"clustered_mixture", "clustered(clusters=12)", "N200 D64 bnhd mixture"},
    {"clustered_one", "clustered(clusters=1)", "N65 D8"},
    {"clustered_more_than_queries", "clustered(clusters=80)", "N65 D8"},
    {"clustered_one_token", "clustered(clusters=4)", "N1 D1"},
    {"clustered_padded_grouped", "clustered(clusters=5,iterations=3)",
     "B3 H4:2 N64 D32:8 padded gaps"},
    {"clustered_packed_bf16", "clustered(clusters=6)", "B1 N129 D64 packed bf16"},
    {"clustered_cross_padded", "clustered(clusters=9,iterations=0)", "B4 N65 S113 D8 padded"},
    {"clustered_equal_tokens", "clustered(clusters=7)", "N64 D8 equal"},
    {"clustered_f64", "clustered(clusters=8,iterations=2)", "N65 D129 f64"},
    {"clustered_hamming", "clustered(clusters=8,clustering=hamming)", "N113"},
    {"clustered_hamming_few_bits_packed",
     "clustered(clusters=10,clustering=hamming,bits=7,hash_bias=false,iterations=2)",
     "B1 N129 D8 packed"},
    {"clustered_hamming_padded_f16", "clustered(clusters=16,clustering=hamming,bits=32)",
     "B3 H4:1 N65 padded f16 mixture"},
    {"clustered_hamming_equal_tokens", "clustered(clusters=5,clustering=hamming)", "N64 D8 equal"},
    {"clustered_hamming_keys", "clustered(clusters=8,clustering=hamming-keys)", "N113 bnhd"},
    {"clustered_hamming_keys_padded_bf16",
     "clustered(clusters=9,clustering=hamming-keys,iterations=1)",
     "B4 H4:2 N63 S65 D16 padded bf16"},
    {"clustered_hamming_keys_packed_f64", "clustered(clusters=7,clustering=hamming-keys,bits=20)",
     "B1 N129 D8 packed f64"},
    {"clustered_long", "clustered(clusters=150)", "B1 H1 N300 D8"},
    {"clustered_hamming_long", "clustered(clusters=130,clustering=hamming)", "B1 H1 N300 D8"},
    {"clustered_near", "clustered(clusters=8,near=16)", "N113"},
    {"clustered_near_one", "clustered(clusters=5,near=1)", "N65 D8 f64"},
    {"clustered_near_odd_padded", "clustered(clusters=6,near=7)", "B3 H4:2 N64 D32:8 padded gaps"},
    {"clustered_near_all", "clustered(clusters=4,near=200)", "N65 D8"},
    {"clustered_near_packed_bf16", "clustered(clusters=6,near=16)", "B1 N129 D64 packed bf16"},
    {"clustered_near_one_token", "clustered(clusters=4,near=16)", "N1 D1"},
    {"clustered_near_long", "clustered(clusters=150,near=32)", "B1 H1 N700 D8"},
};

constexpr Line kImproved[] = {
    {"improved_near", "i-clustered(clusters=8,topk=16,near=16)", "N113 D64"},
    {"improved_near_mixture", "i-clustered(clusters=12,topk=32,near=32)", "N300 bnhd mixture"},
    {"improved_near_padded_grouped", "i-clustered(clusters=5,topk=7,near=16)",
     "B3 H4:2 N65 D32:8 padded gaps"},
    {"improved_near_packed_bf16", "i-clustered(clusters=6,topk=8,near=16)",
     "B1 H4:2 N129 D64 packed bf16"},
    {"improved_near_f16", "i-clustered(clusters=9,topk=12,near=48)", "B2 N200 D64 padded f16"},
    {"improved_near_wide", "i-clustered(clusters=9,topk=12,near=128)", "B1 N600 D96"},
    {"improved_near_odd_f64", "i-clustered(clusters=8,topk=10,near=5)", "N63 D8 f64 integers"},
    {"improved_near_equal_tokens", "i-clustered(clusters=7,topk=5,near=3)", "N64 D8 equal"},
    {"improved_near_more_clusters", "i-clustered(clusters=70,topk=4,near=16)", "N64 D8"},
    {"improved", "i-clustered(clusters=8,topk=16)", "N113 D64"},
    {"improved_mixture", "i-clustered(clusters=12,topk=32)", "N200 bnhd mixture"},
    {"improved_constant_mass", "i-clustered(clusters=6,topk=9,mass_grad=false)", "N65 D8"},
    {"improved_one_token", "i-clustered(clusters=3,topk=2)", "N1 D1"},
    {"improved_more_clusters_than_queries", "i-clustered(clusters=70,topk=4)", "N64 D8"},
    {"improved_topk_beyond_keys", "i-clustered(clusters=4,topk=100)", "N63 D8"},
    {"improved_padded_grouped", "i-clustered(clusters=5,topk=7)", "B3 H4:2 N65 D32:8 padded gaps"},
    {"improved_packed_bf16", "i-clustered(clusters=6,topk=8)", "B1 N129 D64:96 packed bf16"},
    {"improved_cross_padded_f16", "i-clustered(clusters=9,topk=12)", "B4 N64 S113 padded f16"},
    {"improved_equal_tokens", "i-clustered(clusters=7,topk=5)", "N64 D8 equal"},
    {"improved_tied_f64", "i-clustered(clusters=8,topk=10,mass_grad=false)", "N63 D8 f64 integers"},
    {"improved_hamming", "i-clustered(clusters=8,topk=8,clustering=hamming)", "H4:1 N65 D129:16"},
    {"improved_hamming_keys_packed", "i-clustered(clusters=8,topk=8,clustering=hamming-keys)",
     "B1 N113 packed mixture"},
    {"improved_reference", "i-clustered(clusters=8,topk=16,causal=reference)", "N113 causal"},
    {"improved_reference_padded_bf16",
     "i-clustered(clusters=4,topk=6,causal=reference,clustering=hamming)",
     "B3 H4:2 N65 causal padded bf16"},
    {"improved_reference_packed", "i-clustered(clusters=3,topk=9,causal=reference)",
     "B1 N129 D8:16 causal packed gaps"},
    {"improved_reference_packed_even", "i-clustered(clusters=3,topk=9,causal=reference)",
     "B1 N129 D32 causal packed bf16"},
    {"improved_long", "i-clustered(clusters=130,topk=140)", "B1 H1 N300 D8"},
    {"improved_long_clusters", "i-clustered(clusters=2,topk=7)", "B1 H1 N150 S700 D8 mixture"},
    {"improved_reference_long", "i-clustered(clusters=2,topk=140,causal=reference)",
     "B1 H1 N300 D8 causal"},
};

constexpr Line kLsh[] = {
    {"lsh", "lsh(rounds=2,chunk=16,buckets=8)", "N113"},
    {"lsh_causal", "lsh(rounds=3,chunk=8,buckets=16)", "N129 D64 causal bnhd"},
    {"lsh_one_token", "lsh(rounds=2,chunk=4,buckets=2)", "N1 D8"},
    {"lsh_two_tokens", "lsh(rounds=1,chunk=1,buckets=2)", "N2 D8 f64"},
    {"lsh_alone_in_some_rounds", "lsh(rounds=3,chunk=1,buckets=4)", "B3 H4:2 N33 D8 causal padded"},
    {"lsh_one_chunk", "lsh(rounds=2,chunk=80,buckets=4)", "N65 D8"},
    {"lsh_padded_grouped_f16", "lsh(rounds=2,chunk=8,buckets=6)", "B3 H4:2 N65 padded f16"},
    {"lsh_causal_packed_bf16", "lsh(rounds=2,chunk=8,buckets=8)",
     "B1 N129 D32:8 causal packed gaps bf16"},
    {"lsh_packed_even", "lsh(rounds=2,chunk=8,buckets=8)", "B1 N129 D32 packed"},
    {"lsh_equal_tokens", "lsh(rounds=2,chunk=8,buckets=8)", "N63 D8 equal"},
    {"lsh_zero_rows", "lsh(rounds=2,chunk=8,buckets=4)", "N64 D1 integers"},
    {"lsh_mean", "lsh(rounds=2,chunk=16,buckets=8,combine=mean)", "N113 D16"},
    {"lsh_mean_causal_padded", "lsh(rounds=3,chunk=8,buckets=64,combine=mean)",
     "B3 N65 D8 causal padded"},
    {"lsh_mean_packed_f64", "lsh(rounds=2,chunk=7,buckets=4,combine=mean)",
     "B1 H4:1 N129 D8:24 packed f64"},
    {"lsh_long", "lsh(rounds=2,chunk=100,buckets=4)", "B1 H1 N300 D8 causal"},
    {"lsh_mean_long", "lsh(rounds=2,chunk=130,buckets=4,combine=mean)", "B1 H1 N300 D8"},
};

constexpr Line kRouting[] = {
    {"routing", "routing(clusters=6,window=16)", "N113 D16"},
    {"routing_shared", "routing(clusters=4,window=20,share_qk=true)", "N65 bnhd scale=0.2"},
    {"routing_one_token", "routing(clusters=2,window=3)", "N1 D8"},
    {"routing_window_beyond_length", "routing(clusters=3,window=90)", "N63 D8"},
    {"routing_cross_padded", "routing(clusters=4,window=8)",
     "B4 H4:2 N64 S113 D8 padded scale=0.5"},
    {"routing_packed_bf16", "routing(clusters=5,window=12)",
     "B1 N129 D32:8 logit_scale packed bf16"},
    {"routing_packed_even_bf16", "routing(clusters=5,window=12)",
     "B1 H4:2 N129 D32 logit_scale packed bf16"},
    {"routing_shared_kept_f16", "routing(clusters=4,window=16,share_qk=true,self=keep)",
     "B3 N65 D16 padded f16 scale=0.25"},
    {"routing_paper", "routing(clusters=6,window=16,causal=paper)", "N113 D8 causal gaps"},
    {"routing_paper_shared_packed", "routing(clusters=4,window=16,share_qk=true,causal=paper)",
     "B1 H4:1 N129 D16 causal logit_scale packed scale=0.1"},
    {"routing_equal_tokens", "routing(clusters=4,window=8)", "N64 D8 equal"},
    {"routing_balanced", "routing(clusters=8,membership=balanced)", "N113 D16"},
    {"routing_balanced_shared_padded", "routing(clusters=5,membership=balanced,share_qk=true)",
     "B3 H4:2 N65 D8 padded scale=0.3"},
    {"routing_balanced_tied_packed", "routing(clusters=6,membership=balanced)",
     "B1 N129 D8 packed integers"},
    {"routing_balanced_more_clusters", "routing(clusters=70,membership=balanced)", "N63 D8 f64"},
    {"routing_strict", "routing(clusters=4,window=16)", "N113 D16 causal"},
    {"routing_strict_shared", "routing(clusters=5,window=8,share_qk=true)",
     "N129 causal logit_scale bnhd scale=0.2"},
    {"routing_strict_shared_bf16", "routing(clusters=3,window=70,share_qk=true)",
     "B2 H2 N300 D64 causal logit_scale padded bf16 scale=0.2"},
    {"routing_strict_shared_packed_f16", "routing(clusters=4,window=2,share_qk=true)",
     "B1 H2 N129 D64 causal packed f16 scale=0.2"},
    {"routing_strict_shared_own_key_alone", "routing(clusters=4,window=1,share_qk=true)",
     "N65 D8 causal"},
    {"routing_strict_many_clusters_padded", "routing(clusters=6,window=8,queries_in=3)",
     "B3 H4:2 N65 D8 causal padded gaps"},
    {"routing_strict_own_key_packed", "routing(clusters=6,window=4,include_self=true)",
     "B1 N129 D8:24 causal packed"},
    {"routing_strict_packed_even_f16", "routing(clusters=6,window=4)",
     "B1 H4:2 N129 D64 causal packed f16"},
    {"routing_strict_demoted", "routing(clusters=4,window=8,self=demote)", "N65 D8 causal"},
    {"routing_strict_shared_several_bf16",
     "routing(clusters=4,window=6,share_qk=true,queries_in=2,self=keep)",
     "N63 D16 causal bf16 scale=0.25"},
    {"routing_strict_all_clusters_f64", "routing(clusters=3,window=100,queries_in=9)",
     "N65 D129 causal f64 scale=0.1"},
    {"routing_strict_equal_tokens", "routing(clusters=3,window=5)", "N64 D8 causal equal"},
    {"routing_long", "routing(clusters=3,window=160)", "B1 H1 N600 D8"},
    {"routing_balanced_long", "routing(clusters=2,membership=balanced)", "B1 H1 N300 D8"},
    {"routing_strict_long", "routing(clusters=2,window=140)", "B1 H1 N300 D8 causal"},
    {"routing_many_clusters", "routing(clusters=150,window=5)", "B1 H1 N300 D8"},
    {"routing_strict_logit_scale_f16", "routing(clusters=4,window=8)",
     "N65 D16 causal logit_scale f16 scale=0.3"},
};

constexpr Line kCast[] = {
    {"cast", "cast(clusters=6,size=20)", "N113 D16"},
    {"cast_one_token", "cast(clusters=2,size=3)", "N1 D8"},
    {"cast_padded_f16", "cast(clusters=5,size=16)", "B3 N65 padded f16"},
    {"cast_packed_bf16", "cast(clusters=4,size=12)", "B1 N129 D32:8 packed bnhd bf16"},
    {"cast_packed_even_bf16", "cast(clusters=5,size=12)", "B1 N129 D32 packed bf16"},
    {"cast_laplace_single_packed_even", "cast(clusters=5,size=30,mode=single,activation=laplace)",
     "B1 N129 D32 packed"},
    {"cast_heads_apart_grouped", "cast(clusters=4,size=10,heads=separate)", "H4:2 N65 D8 gaps"},
    {"cast_without_gate", "cast(clusters=4,size=16,gate_scale=false)", "N64 D8"},
    {"cast_few_members", "cast(clusters=3,size=4)", "N63 D8 f64"},
    {"cast_equal_tokens", "cast(clusters=3,size=8)", "N64 D8 equal"},
    {"cast_single", "cast(clusters=8,size=15,mode=single)", "N113 D8"},
    {"cast_single_more_clusters", "cast(clusters=70,size=2,mode=single)", "N65 D8"},
    {"cast_single_padded", "cast(clusters=6,size=11,mode=single)", "B3 H1 N64 D16 padded"},
    {"cast_laplace", "cast(clusters=5,size=12,activation=laplace)", "N65 D16"},
    {"cast_laplace_single_packed",
     "cast(clusters=6,size=22,mode=single,activation=laplace,heads=separate)",
     "B1 N129 D8:16 packed"},
    {"cast_long", "cast(clusters=3,size=160)", "B1 H1 N300 D8"},
    {"cast_many_clusters", "cast(clusters=140,size=3)", "B1 H1 N300 D8"},
};

// Attention dropout, in every form that has kernels of its own.
constexpr Line kDropout[] = {
    {"dropout_full", "full", "N113 D32 dropout=0.1"},
    {"dropout_full_causal_grouped_bf16", "full", "H4:2 N200 D64 causal bf16 dropout=0.1"},
    {"dropout_full_mask_padded_f16", "full", "B3 N65 S97 D32:16 padded mask gaps f16 dropout=0.3"},
    {"dropout_full_f64", "full", "B1 N33 D8 f64 dropout=0.9"},
    {"dropout_full_one_query", "full", "H4:2 N1 S300 D64 bf16 dropout=0.3"},
    {"dropout_local", "local(window=33)", "N200 D32 causal dropout=0.1"},
    {"dropout_local_blocked_bf16", "local(window=32,kind=blocked)",
     "B1 N257 D64 packed bf16 dropout=0.2"},
    {"dropout_strided", "strided(stride=7)", "N129 D16 causal dropout=0.5"},
    {"dropout_oracle_top", "oracle-top(topk=9)", "H4:2 N113 D32 padded dropout=0.1"},
    {"dropout_oracle_top_bf16", "oracle-top(topk=32)", "N200 D64 causal bf16 dropout=0.3"},
    {"dropout_clustered", "clustered(clusters=7)", "H4:2 N113 S130 D32 dropout=0.1"},
    {"dropout_clustered_packed_bf16", "clustered(clusters=9)",
     "B1 N257 D64 packed bf16 dropout=0.5"},
    {"dropout_i_clustered", "i-clustered(clusters=7,topk=9)", "H4:2 N113 S130 D32 dropout=0.1"},
    {"dropout_i_clustered_constant_mass_bf16", "i-clustered(clusters=9,topk=32,mass_grad=false)",
     "B3 N200 D64 padded bf16 dropout=0.5"},
    {"dropout_i_clustered_reference", "i-clustered(clusters=5,topk=9,causal=reference)",
     "N113 D16 dropout=0.3"},
    {"dropout_clustered_near", "clustered(clusters=9,near=16)", "H4:2 N257 D32 dropout=0.1"},
    {"dropout_i_clustered_near", "i-clustered(clusters=9,topk=9,near=16)",
     "B3 N200 D32 padded dropout=0.3"},
    {"dropout_i_clustered_near_packed_bf16", "i-clustered(clusters=9,topk=32,near=32)",
     "B1 H4:2 N300 D64 packed bf16 dropout=0.1"},
    {"dropout_lsh", "lsh(rounds=3,chunk=16,buckets=8)", "N113 D16 dropout=0.1"},
    {"dropout_lsh_mean_bf16", "lsh(rounds=2,chunk=16,buckets=8,combine=mean)",
     "N113 D32 causal bf16 dropout=0.3"},
    {"dropout_routing", "routing(clusters=5,window=20)", "H4:2 N113 D16 scale=0.3 dropout=0.1"},
    {"dropout_routing_paper_bf16", "routing(clusters=5,window=20,causal=paper,share_qk=true)",
     "N113 D32 causal bf16 scale=0.3 dropout=0.3"},
    {"dropout_routing_balanced", "routing(clusters=4,membership=balanced)",
     "B3 N65 D16 padded scale=0.3 dropout=0.5"},
    {"dropout_routing_strict_self", "routing(clusters=5,window=9,queries_in=2,include_self=true)",
     "N129 D16 causal scale=0.3 dropout=0.3"},
    {"dropout_routing_strict_shared_f16", "routing(clusters=4,window=30,share_qk=true)",
     "B1 N257 D32 causal packed f16 scale=0.3 dropout=0.1"},
    {"dropout_cast", "cast(clusters=6,size=20)", "N113 D16 dropout=0.1"},
    {"dropout_cast_single", "cast(clusters=5,size=40,mode=single)",
     "B3 H4:2 N130 D32 padded dropout=0.3"},
    {"dropout_cast_packed_bf16", "cast(clusters=5,size=12)", "B1 N129 D32 packed bf16 dropout=0.3"},
    {"dropout_cast_laplace", "cast(clusters=5,size=12,activation=laplace,heads=separate)",
     "N65 D16 dropout=0.3"},
};

// Calls that are parts of larger ones, by every mechanism that draws random numbers per head.
constexpr Line kParts[] = {
    {"part_clustered", "clustered(clusters=7)", "H4:2 N113 D32 padded part"},
    {"part_clustered_hamming", "clustered(clusters=7,clustering=hamming)", "H4:2 N113 D32 part"},
    {"part_clustered_hamming_keys_bf16", "clustered(clusters=7,clustering=hamming-keys)",
     "B3 H4:2 N200 D64 bf16 part"},
    {"part_i_clustered_packed_bf16", "i-clustered(clusters=9,topk=32)",
     "B1 H4:2 N300 D64 packed bf16 part"},
    {"part_dropout_full", "full", "H4:2 N113 D32 part dropout=0.3"},
    {"part_dropout_cast", "cast(clusters=6,size=20)", "N113 D16 part dropout=0.3"},
    {"part_dropout_routing", "routing(clusters=5,window=20)",
     "H4:2 N113 D16 scale=0.3 part dropout=0.3"},
};

std::int64_t integer(const std::string& text) {
  std::int64_t value = -1;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value).ptr;
  if (end != text.data() + text.size() || value < 0)
    throw Error("[cases] expected a size; got " + text);
  return value;
}

// "4:2" into both, "4" into the first.
void integers(const std::string& text, std::int64_t& first, std::int64_t& second) {
  const std::size_t colon = text.find(':');
  first = integer(text.substr(0, colon));
  if (colon != std::string::npos) second = integer(text.substr(colon + 1));
}

// Reads a word that names a value of an enumeration; false for any other word.
bool read_choice(const std::string& word, Case& c) {
  static const std::map<std::string, Lengths> lengths = {
      {"padded", Lengths::padded}, {"packed", Lengths::packed}, {"drawn", Lengths::drawn}};
  static const std::map<std::string, Layout> layouts = {{"bnhd", Layout::bnhd},
                                                        {"gaps", Layout::gaps}};
  static const std::map<std::string, DType> dtypes = {
      {"f64", DType::f64}, {"bf16", DType::bf16}, {"f16", DType::f16}};
  static const std::map<std::string, Data> data = [] {
    std::map<std::string, Data> names;
    for (int d = 0; d <= static_cast<int>(Data::nonfinite); ++d)
      names[data_name(static_cast<Data>(d))] = static_cast<Data>(d);
    return names;
  }();
  const auto choose = [&](const auto& words, auto& value) {
    const auto found = words.find(word);
    if (found == words.end()) return false;
    value = found->second;
    return true;
  };
  return choose(lengths, c.lengths) || choose(layouts, c.layout) || choose(dtypes, c.dtype) ||
         choose(data, c.data);
}

void read_word(const std::string& word, Case& c) {
  if (read_choice(word, c)) return;
  const std::string rest = word.substr(1);
  if (word == "causal") {
    c.causal = true;
  } else if (word == "mask") {
    c.mask = true;
  } else if (word == "logit_scale") {
    c.logit_scale = true;
  } else if (word == "part") {
    c.part = true;
  } else if (word.starts_with("scale=")) {
    c.scale = std::stod(word.substr(6));
  } else if (word.starts_with("dropout=")) {
    c.dropout = std::stod(word.substr(8));
  } else if (word[0] == 'B') {
    c.B = integer(rest);
  } else if (word[0] == 'H') {
    integers(rest, c.H, c.Hkv);
  } else if (word[0] == 'N') {
    c.N = integer(rest);
  } else if (word[0] == 'S') {
    c.S = integer(rest);
  } else if (word[0] == 'D') {
    integers(rest, c.Dk, c.Dv);
  } else {
    throw Error("[cases] expected a word of a case's shape; got " + word);
  }
}

}  // namespace

Case make_case(const std::string& name, const std::string& spec, const std::string& shape) {
  Case c;
  c.name = name;
  c.spec = spec;
  std::istringstream words(shape);
  for (std::string word; words >> word;) read_word(word, c);
  return completed(c);
}

const char* data_name(Data data) {
  constexpr const char* kNames[] = {"normal", "mixture",  "equal",  "integers", "one_cluster",
                                    "spread", "disjoint", "sparse", "zipf",     "repeated",
                                    "zeros",  "large",    "huge",   "trained",  "nonfinite"};
  return kNames[static_cast<int>(data)];
}

Case completed(Case c) {
  if (c.Hkv == 0) c.Hkv = c.H;
  if (c.S == 0) c.S = c.N;
  if (c.Dv == 0) c.Dv = c.Dk;
  return c;
}

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::vector<Case> all() {
  std::vector<Case> cases;
  const auto add = [&](const auto& lines) {
    for (const Line& line : lines) cases.push_back(make_case(line.name, line.spec, line.shape));
  };
  add(kFull);
  add(kLocal);
  add(kStrided);
  add(kOracle);
  add(kClustered);
  add(kImproved);
  add(kLsh);
  add(kRouting);
  add(kCast);
  add(kDropout);
  add(kParts);
  return cases;
}

}  // namespace coterie::cases

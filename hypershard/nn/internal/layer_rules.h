// Layout rules of the fused operators, registered where the operators are defined.
#pragma once

#include "hypershard/dtensor/rule_call.h"

namespace hypershard::nn::internal {

/// q [batch, positions, heads, width], k and v [batch, positions, kv_heads, width]: batch and heads
/// may be cut, heads of queries into whole groups of one key head.
dtensor::DimMap attention_forward_rule(const dtensor::RuleCall& call);
/// logits [rows, classes], targets [rows]: rows may be cut; the loss is then Partial(avg), right if
/// all pieces have as many targets that count.
dtensor::DimMap cross_entropy_forward_rule(const dtensor::RuleCall& call);
/// logits [rows, classes], targets [rows], with the rows of the projection that made the logits:
/// rows may be cut as above, classes on exactly the axes that the operator itself reduces over.
dtensor::DimMap cross_entropy_part_forward_rule(const dtensor::RuleCall& call);
/// weight [rows, dim], indices [...]: all may be cut; the rows of a part become Partial(sum).
dtensor::DimMap embedding_forward_rule(const dtensor::RuleCall& call);
/// x [..., in], weight [out, in] and maybe a bias [out], libtorch's operator on oneDNN without a
/// function behind the product: as aten::linear.
dtensor::DimMap fast_linear_rule(const dtensor::RuleCall& call);
/// x [..., dim], weight [dim]: all but the last dimension may be cut.
dtensor::DimMap rms_norm_forward_rule(const dtensor::RuleCall& call);
/// x [batch, positions, heads, width], tables [positions, width / 2]: positions may be cut if those
/// of the tables are.
dtensor::DimMap rotate_rule(const dtensor::RuleCall& call);
/// gate and up alike: all dimensions may be cut; linear in `up`.
dtensor::DimMap swiglu_forward_rule(const dtensor::RuleCall& call);

}  // namespace hypershard::nn::internal

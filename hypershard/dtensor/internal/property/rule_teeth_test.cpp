// Does the property bite? Operators of this test get rules that are wrong in one way each, and
// every one must be found out; the same operators with right rules must pass.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "hypershard/dtensor/internal/property/rule_check.h"
#include "hypershard/dtensor/op_rules.h"
#include "hypershard/dtensor/rule_call.h"

namespace hypershard::dtensor::property {
namespace {

at::Tensor softmax(const at::Tensor& self) {
  return self.softmax(-1);
}
at::Tensor total(const at::Tensor& self) {
  return self.sum(-1);
}
at::Tensor mean(const at::Tensor& self) {
  return self.mean(-1);
}
at::Tensor transposed(const at::Tensor& self) {
  return self.transpose(0, 1).contiguous();
}
at::Tensor squared(const at::Tensor& self) {
  return self * self;
}
at::Tensor shifted(const at::Tensor& self) {
  return self + 1.0;
}
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b);
}
at::Tensor product_plus(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return at::addmm(c, a, b);
}
at::Tensor halves(const at::Tensor& self) {
  return self.reshape({self.size(0) * 2, -1});
}
at::Tensor doubled(const at::Tensor& self) {
  return at::cat({self, self}, 0);
}

TORCH_LIBRARY(hs_rule_teeth, m) {
  for (const char* quality : {"right_", "wrong_"}) {
    const auto name = [&](const char* op) { return std::string(quality) + op; };
    m.def(name("softmax").c_str(), softmax);
    m.def(name("total").c_str(), total);
    m.def(name("mean").c_str(), mean);
    m.def(name("transposed").c_str(), transposed);
    m.def(name("squared").c_str(), squared);
    m.def(name("shifted").c_str(), shifted);
    m.def(name("product").c_str(), product);
    m.def(name("product_plus").c_str(), product_plus);
    m.def(name("halves").c_str(), halves);
    m.def(name("doubled").c_str(), doubled);
  }
}

/// A matrix as operand; labels 0 and 1 unless they are whole.
DimMap matrix(Reduction rows = Reduction::kRefused, Reduction columns = Reduction::kRefused) {
  DimMap map;
  map.new_label(rows);
  map.new_label(columns);
  map.operands = {{{Dim::of(0), Dim::of(1)}}};
  return map;
}

DimMap with_output(DimMap map, Dims dims, std::vector<std::vector<int>> terms = {}) {
  map.outputs = {{std::move(dims)}};
  map.terms = std::move(terms);
  return map;
}

DimMap row_product(Reduction inner, bool has_added, bool knows_added) {
  DimMap map;
  for (const Reduction reduction : {Reduction::kRefused, inner, Reduction::kRefused}) {
    map.new_label(reduction);
  }
  map.operands = {{{Dim::of(0), Dim::of(1)}}, {{Dim::of(1), Dim::of(2)}}};
  std::vector<std::vector<int>> terms = {{0, 1}};
  if (has_added) {
    map.operands.push_back({{Dim::of(0), Dim::of(2)}});
  }
  if (knows_added) {
    terms.push_back({2});
  }
  return with_output(std::move(map), {Dim::of(0), Dim::of(2)}, std::move(terms));
}

Dims whole_columns(const RuleCall& call) {
  return {Dim::of(0), Dim::whole(call.shape(0)[1])};
}

void register_rules() {
  const auto both = [](const char* op, OpRule right, OpRule wrong) {
    register_op_rule(std::string("hs_rule_teeth::right_") + op, std::move(right));
    register_op_rule(std::string("hs_rule_teeth::wrong_") + op, std::move(wrong));
  };
  const auto plain = [](const RuleCall&) {
    return with_output(matrix(), {Dim::of(0), Dim::of(1)});
  };
  const auto linear = [](const RuleCall&) {
    return with_output(matrix(), {Dim::of(0), Dim::of(1)}, {{0}});
  };
  both(
      "softmax",
      [](const RuleCall& call) {
        DimMap map = matrix();
        map.operands[0].dims[1] = Dim::whole();
        return with_output(std::move(map), whole_columns(call));
      },
      plain
  );  // what is normalised together is cut
  const auto reducing = [](Reduction reduction) {
    return [reduction](const RuleCall&) {
      return with_output(matrix(Reduction::kRefused, reduction), {Dim::of(0)}, {{0}});
    };
  };
  both("total", reducing(Reduction::kSum), reducing(Reduction::kMean));
  both("mean", reducing(Reduction::kMean), reducing(Reduction::kSum));
  both(
      "transposed",
      [](const RuleCall&) { return with_output(matrix(), {Dim::of(1), Dim::of(0)}, {{0}}); },
      linear
  );
  both("squared", plain, linear);  // sums of terms do not pass a square
  both("shifted", plain, linear);  // and a constant would be added by each rank
  both(
      "product",
      [](const RuleCall&) { return row_product(Reduction::kSum, false, false); },
      [](const RuleCall&) { return row_product(Reduction::kMax, false, false); }
  );
  both(
      "product_plus",
      [](const RuleCall&) { return row_product(Reduction::kSum, true, true); },
      [](const RuleCall&) { return row_product(Reduction::kSum, true, false); }
  );
  const auto halving = [](std::int64_t size) {
    return [size](const RuleCall& call) {
      DimMap map = matrix();
      map.operands[0].dims[1] = Dim::whole();
      return with_output(
          std::move(map), {Dim::of(0, 2), Dim::whole(call.shape(0)[1] / size)}, {{0}}
      );
    };
  };
  both("halves", halving(2), halving(1));
  both(
      "doubled",
      [](const RuleCall& call) {
        DimMap map = matrix();
        map.operands[0].dims[0] = Dim::whole();
        return with_output(std::move(map), {Dim::whole(2 * call.shape(0)[0]), Dim::of(1)}, {{0}});
      },
      [](const RuleCall&) {
        return with_output(matrix(), {Dim::of(0, 2), Dim::of(1)}, {{0}});  // pieces interleave
      }
  );
}

Arguments operands_of(const std::string& op, Draw& d) {
  if (op.find("product") == std::string::npos) {
    return {d.real({d.even(), d.even()})};
  }
  const std::int64_t rows = d.even();
  const std::int64_t inner = d.even();
  const std::int64_t columns = d.even();
  Arguments made = {d.real({rows, inner}), d.real({inner, columns})};
  if (op == "product_plus") {
    made.emplace_back(d.real({rows, columns}));
  }
  return made;
}

TEST(RuleTeethTest, WrongRulesAreCaughtAndRightOnesPass) {
  register_rules();
  const layout::DeviceMesh mesh({{"tp", 2}}, layout::Topology::single_supernode(2));
  for (const std::string op :
       {"softmax",
        "total",
        "mean",
        "transposed",
        "squared",
        "shifted",
        "product",
        "product_plus",
        "halves",
        "doubled"}) {
    const auto make = [op](Draw& d) { return operands_of(op, d); };
    const CheckResult right = check_rule({"hs_rule_teeth::right_" + op, make}, mesh, 400, 40);
    EXPECT_EQ(right.fault, "");
    EXPECT_GT(right.accepted, 0) << op;
    const CheckResult wrong = check_rule({"hs_rule_teeth::wrong_" + op, make}, mesh, 400, 400);
    EXPECT_NE(wrong.fault, "") << op << ": the wrong rule passed " << wrong.accepted << " calls";
  }
}

}  // namespace
}  // namespace hypershard::dtensor::property

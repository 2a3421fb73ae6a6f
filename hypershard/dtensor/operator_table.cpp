// One row a family; users' own rules are not part of the list.
#include "hypershard/dtensor/operator_table.h"

#include <map>
#include <string_view>
#include <vector>

#include "hypershard/core/text.h"
#include "hypershard/dtensor/op_rules.h"

namespace hypershard::dtensor {
namespace {

constexpr std::string_view kNamespace = "aten::";

struct Row {
  std::string operators;
  int count = 0;
};
using Table = std::map<std::string, Row>;

Table table_of(bool takes_cuts, std::string_view mark) {
  Table table;
  for (const RuledOperator& ruled : ruled_operators()) {
    if (ruled.takes_cuts != takes_cuts || !ruled.name.starts_with(kNamespace)) {
      continue;
    }
    Row& row = table[ruled.family];
    row.operators +=
        concat_text(row.count == 0 ? "" : ", ", mark, ruled.name.substr(kNamespace.size()), mark);
    row.count += 1;
  }
  return table;
}

std::string rows_text(const Table& table, bool as_markdown) {
  std::string text;
  for (const auto& [family, row] : table) {
    text += text.empty() ? "" : "\n";
    text += as_markdown ? concat_text("| ", family, " | ", row.count, " | ", row.operators, " |")
                        : concat_text(family, " (", row.count, "): ", row.operators);
  }
  return text;
}

int total(const Table& table) {
  int count = 0;
  for (const auto& [family, row] : table) {
    count += row.count;
  }
  return count;
}

}  // namespace

std::string describe_operators(bool as_markdown) {
  const std::string_view mark = as_markdown ? "`" : "";
  const Table taking = table_of(true, mark);
  const Table other = table_of(false, mark);
  const std::string head = as_markdown ? "| family | count | operators |\n|---|---|---|\n" : "";
  return concat_text(
      total(taking),
      " ATen operators take cut or Partial operands; overloads, in-place and out variants count "
      "with them.\nA test compares each with the plain operator on meshes of 2, 4 and 2x2 ranks."
      "\n\n",
      head,
      rows_text(taking, as_markdown),
      "\n\nThese give Replicate results or are refused, whatever the layout:\n\n",
      head,
      rows_text(other, as_markdown)
  );
}

}  // namespace hypershard::dtensor

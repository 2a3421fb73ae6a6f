// Calls of losses.
#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {

void add_loss_cases(RuleCases& cases) {
  for (const char* op :
       {"mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "binary_cross_entropy",
        "soft_margin_loss",
        "hinge_embedding_loss"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{
                           d.real(shape, 0.05, 0.95),
                           d.real(shape, 0.05, 0.95),
                           named("reduction", d.number(3))
                       };
                     }});
  }
  cases.push_back({"aten::poisson_nll_loss", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{
                         d.real(shape), d.real(shape, 0.1, 2.0), true, false, 1e-8, d.number(3)
                     };
                   }});
  cases.push_back({"aten::binary_cross_entropy_with_logits", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{
                         d.real(shape),
                         d.real(shape, 0.0, 1.0),
                         d.flag() ? Argument(d.real(d.beside(shape))) : none(),
                         none(),
                         d.number(3)
                     };
                   }});
  for (const char* op : {"cross_entropy_loss", "nll_loss_nd"}) {
    for (int spatial = 0; spatial <= 1; ++spatial) {
      cases.push_back({std::string("aten::") + op, [spatial](Draw& d) {
                         const std::int64_t classes = 2 + d.number(5);
                         const Sizes one = {d.size(), classes};
                         const Sizes many = {one[0], classes, d.size()};
                         const bool is_weighted = d.flag();
                         return Arguments{
                             d.real(spatial ? many : one),
                             d.whole_numbers(
                                 spatial ? Sizes{many[0], many[2]} : Sizes{one[0]}, classes
                             ),
                             is_weighted ? Argument(d.real({classes}, 0.5, 2.0)) : none(),
                             d.number(3)
                         };
                       }});
    }
  }
  cases.push_back({"aten::cross_entropy_loss", [](Draw& d) {  // probabilities
                     const Sizes shape = {d.size(), 1 + d.number(6)};
                     return Arguments{d.real(shape), d.real(shape, 0.0, 1.0), none(), d.number(3)};
                   }});
  for (const char* op : {"nll_loss", "nll_loss_forward"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = {d.size(), 1 + d.number(6)};
                       return Arguments{
                           d.real(shape),
                           d.whole_numbers({shape[0]}, shape[1]),
                           d.flag() ? Argument(d.real({shape[1]}, 0.5, 2.0)) : none(),
                           d.number(3),
                           -100
                       };
                     }});
  }
  for (const char* op : {"nll_loss2d", "nll_loss2d_forward"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = {d.size(), 1 + d.number(6), d.size(), d.size()};
                       return Arguments{
                           d.real(shape),
                           d.whole_numbers({shape[0], shape[2], shape[3]}, shape[1]),
                           none(),
                           d.number(3),
                           -100
                       };
                     }});
  }
}

}  // namespace hypershard::dtensor::property

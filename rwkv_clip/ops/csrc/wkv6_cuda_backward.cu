// The backward kernels of all element types.
#include "wkv6_cuda_plan.h"

namespace wkv6 {

int backward_shared_bytes(const Plan& plan, bool split) {
    const auto bytes = [&](auto is_split) {
        return with_size<is_split()>(plan, [&](auto blocks, auto chunked) {
            return BackwardLayout<is_split(), blocks(), chunked()>(plan.groups).bytes;
        });
    };
    return split ? bytes(std::true_type{}) : bytes(std::false_type{});
}

int launch_backward(const Job& job, const Plan& plan) {
    return with_types(job.params, [&](auto element, auto w) {
        using Element = decltype(element);
        using W = decltype(w);
        return with_size<Element::kSplit>(plan, [&](auto blocks, auto chunked) {
            return launch(backward_kernel<Element, W, blocks(), chunked()>, job.params.B * job.params.H, plan.chunks,
                          32 * plan.blocks, plan.shared_bytes, job);
        });
    });
}

}  // namespace wkv6

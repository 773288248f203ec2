// A device named cuda for machines without one: its memory is the host's and its operators are those of the CPU. What it
// keeps of a GPU is what a program can get wrong on one: tensors of different devices are refused, as CUDA refuses them.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

using namespace at;
static const Device CUDA0(DeviceType::CUDA, 0);
static DeviceIndex number() {  // of devices: as CUDA, it has none where the program shall see none
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible != nullptr && *visible == 0 ? 0 : 1;
}

// ---- one device, with one stream on which everything is done at once
namespace c10::impl {
struct EmulatedGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return number(); }
  Device getDevice() const override { return CUDA0; }
  Device exchangeDevice(Device) const override { return CUDA0; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, CUDA0); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, CUDA0); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = nullptr; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, EmulatedGuard);
}  // namespace c10::impl

namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // the registry knows this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return number() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return number(); }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

// ---- its memory, counted
static std::atomic<int64_t> allocated{0}, peak{0};
extern "C" int64_t emulated_cuda_peak() { return peak; }
extern "C" void emulated_cuda_reset_peak() { peak = allocated.load(); }

struct HostMemory final : c10::Allocator {
  static void release(void* block) {
    allocated -= *static_cast<int64_t*>(block);
    std::free(block);
  }
  DataPtr allocate(size_t size) override {  // the size is kept in 64 bytes before the data
    auto* block = static_cast<char*>(std::aligned_alloc(64, 64 + (size + 63) / 64 * 64));
    TORCH_CHECK(block != nullptr, "out of memory: ", size, " bytes");
    *reinterpret_cast<int64_t*>(block) = static_cast<int64_t>(size);
    allocated += static_cast<int64_t>(size);
    peak = std::max(peak.load(), allocated.load());
    return {block + 64, block, &release, CUDA0};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
static HostMemory memory;
static const bool memory_set = (c10::SetAllocator(DeviceType::CUDA, &memory), true);

// ---- its operators
static const DispatchKeySet KEYS(DispatchKey::CUDA);

static Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>,
                    std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, dtype_or_default(dtype), format);
}

static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                            std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, dtype_or_default(dtype));
}

static Tensor on_host(const Tensor& x) {  // a CPU tensor over the same memory
  if (!x.is_cuda()) return x;
  auto data = DataPtr(x.storage().mutable_data(), Device(DeviceType::CPU));
  auto storage = Storage(Storage::use_byte_size_t(), x.storage().nbytes(), std::move(data), nullptr, false);
  auto y = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), x.dtype());
  y.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
  y.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
  return y;
}

static Tensor& copy_(Tensor& to, const Tensor& from, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  return copy_from(from, to.resize_(from.sizes()), false);
}

static Scalar item(const Tensor& x) { return on_host(x).item(); }

static void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const std::string& name = op.schema().name();
  const bool indexing = name.find("aten::index") == 0 || name.find("aten::_index_put") == 0;
  const auto check = [&](const Tensor& x) {  // CUDA takes a number, and indices, from the host
    TORCH_CHECK(!x.defined() || x.is_cuda() || x.dim() == 0, "mixed devices: ", name, " has arguments on both");
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& value = *(stack->end() - arguments.size() + i);
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList() && !indexing)
      for (const Tensor& x : value.toTensorVector()) check(x);
  }
  native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", native::as_strided_tensorimpl);
  library.impl("view", native::view);
  library.impl("_reshape_alias", native::_reshape_alias);
  library.impl("resize_", native::resize_);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("set_.source_Tensor", native::set_tensor_);
  library.impl("set_.source_Storage", native::set_);
  library.impl("set_.source_Storage_storage_offset", native::set_storage_cpu_);
}

namespace at::native {
static int64_t plain_attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask,
                               double, bool, std::optional<double>, bool) {
  TORCH_CHECK(!mask || mask->scalar_type() == kBool || mask->scalar_type() == query.scalar_type(),
              "invalid dtype for bias - should match query's dtype");
  return 0;  // SDPBackend::math
}
static const bool attention_set = (_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention), true);
}  // namespace at::native

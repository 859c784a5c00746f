// Error texts, and the record of calls to entry points that aren't implemented.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "runtime.h"
#include "unimplemented.h"

namespace sim {
namespace {

std::string& recent_error() {
  static thread_local std::string text;
  return text;
}

std::map<std::string, int>& unimplemented() {
  static std::map<std::string, int> calls;
  return calls;
}

}  // namespace

aclError remember_error(aclError code, const std::string& text) {
  recent_error() = "simulated device: " + text;
  return code;
}

std::string unimplemented_calls() {
  std::ostringstream json;
  const char* separator = "";
  json << "{";
  for (const auto& [name, count] : unimplemented()) {
    json << separator << '"' << name << "\": " << count;
    separator = ", ";
  }
  json << "}";
  return json.str();
}

}  // namespace sim

int sim_unimplemented(const char* name) {
  const sim::Lock lock;
  ++sim::unimplemented()[name];
  return sim::fail(ACL_ERROR_API_NOT_SUPPORT, name, " isn't implemented");
}

// The text stays valid until this thread asks again.
const char* sim_acl_report() {
  const sim::Lock lock;
  static thread_local std::string report;
  report = "{\"unimplemented\": " + sim::unimplemented_calls() +
           ", \"launches\": " + sim::launches() + "}";
  return report.c_str();
}

// The text of this thread's last error, which is then forgotten.
const char* aclGetRecentErrMsg() {
  static thread_local std::string text;
  text = std::move(sim::recent_error());
  sim::recent_error().clear();
  return text.empty() ? nullptr : text.c_str();
}

void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t, const char* format,
               ...) {
  if (level < ACL_ERROR || std::getenv("PAGED_SIM_LOG") == nullptr) return;
  std::fprintf(stderr, "%s: ", function);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
}

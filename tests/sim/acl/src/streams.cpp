// Streams, events, and the capture of streams into graphs.
#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "runtime.h"

namespace sim {
namespace {

using Clock = std::chrono::steady_clock;

// A point in a stream. Waiting for one never takes time, because tasks have finished when they were
// submitted; but a stream that waits for an event of a captured stream joins the capture.
struct Event {
  bool recorded = false;
  Clock::time_point when;
  Graph* capture = nullptr;
};

std::set<Stream*> streams;
std::set<Event*> events;
std::set<Graph*> graphs;
uint32_t graphs_so_far = 0;
bool hung = false;
thread_local aclmdlRICaptureMode capture_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

Stream* default_stream(int device) {
  static Stream defaults[kNumDevices] = {{.device = 0}, {.device = 1}};
  return device < 0 ? nullptr : &defaults[device];
}

// Null handles mean the default stream; anything else must be alive.
aclError find_stream(aclrtStream handle, Stream** stream) {
  *stream = stream_of(handle);
  if (*stream == nullptr) {
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "stream ", handle, " doesn't exist");
  }
  return ACL_SUCCESS;
}

aclError find_event(aclrtEvent handle, Event** event) {
  *event = static_cast<Event*>(handle);
  if (!events.contains(*event)) {
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "event ", handle, " doesn't exist");
  }
  return ACL_SUCCESS;
}

aclError find_graph(aclmdlRI handle, Graph** graph) {
  *graph = static_cast<Graph*>(handle);
  if (!graphs.contains(*graph)) {
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "graph ", handle, " doesn't exist");
  }
  return ACL_SUCCESS;
}

aclError check_not_captured(const Stream& stream, const char* call) {
  if (stream.capture == nullptr) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_STREAM_CAPTURED, call, " waits for a stream that is being captured");
}

aclError create_stream(aclrtStream* handle) {
  if (current_device() < 0) {
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "a stream needs a device: aclrtSetDevice comes first");
  }
  Stream* stream = new Stream{.device = current_device()};
  streams.insert(stream);
  *handle = stream;
  return ACL_SUCCESS;
}

aclError destroy_stream(aclrtStream handle) {
  Stream* stream = static_cast<Stream*>(handle);
  if (streams.erase(stream) == 0) {
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "stream ", handle, " doesn't exist");
  }
  delete stream;
  return ACL_SUCCESS;
}

// Waits for whatever was submitted: no time, or on a hung device for ever, or so many milliseconds.
aclError wait(const char* call, int32_t milliseconds) {
  if (!hung) return ACL_SUCCESS;
  const auto limit = std::chrono::milliseconds(milliseconds);
  do {
    std::this_thread::sleep_for(std::max(limit, std::chrono::milliseconds(1)));
  } while (milliseconds < 0);
  return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, call, " waited for ", milliseconds, " ms");
}

aclError synchronize_stream(aclrtStream handle, const char* call, int32_t milliseconds = -1) {
  Stream* stream;
  if (const aclError error = find_stream(handle, &stream)) return error;
  if (const aclError error = check_not_captured(*stream, call)) return error;
  return wait(call, milliseconds);
}

aclError synchronize_device(const char* call, int32_t milliseconds) {
  if (const aclError error = check_not_capturing(call)) return error;
  return wait(call, milliseconds);
}

}  // namespace

void hang_streams() { hung = true; }

Stream* stream_of(aclrtStream handle) {
  if (handle == nullptr) return default_stream(current_device());
  Stream* stream = static_cast<Stream*>(handle);
  return streams.contains(stream) ? stream : nullptr;
}

aclError submit(aclrtStream handle, Task task) {
  Stream* stream;
  if (const aclError error = find_stream(handle, &stream)) return error;
  if (stream->device != current_device()) {
    return fail(ACL_ERROR_RT_STREAM_CONTEXT, "stream ", handle, " belongs to device ",
                stream->device, ", but device ", current_device(), " is current");
  }
  if (hung) return ACL_SUCCESS;
  if (stream->capture == nullptr) return task();
  stream->capture->tasks.push_back(std::move(task));
  return ACL_SUCCESS;
}

aclError check_not_capturing(const char* call) {
  if (capture_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return ACL_SUCCESS;
  for (const Stream* stream : streams) {
    if (stream->capture != nullptr) {
      return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, call,
                  " can't be captured, and a stream is being captured");
    }
  }
  return ACL_SUCCESS;
}

}  // namespace sim

using sim::Lock;

aclError aclrtCreateStream(aclrtStream* stream) {
  const Lock lock;
  return sim::create_stream(stream);
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  const Lock lock;
  return sim::create_stream(stream);
}

aclError aclrtDestroyStream(aclrtStream stream) {
  const Lock lock;
  return sim::destroy_stream(stream);
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
  const Lock lock;
  return sim::destroy_stream(stream);
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  const Lock lock;
  return sim::synchronize_stream(stream, "aclrtSynchronizeStream");
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
  const Lock lock;
  return sim::synchronize_stream(stream, "aclrtSynchronizeStreamWithTimeout", milliseconds);
}

aclError aclrtSynchronizeDevice() {
  const Lock lock;
  return sim::synchronize_device("aclrtSynchronizeDevice", -1);
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
  const Lock lock;
  return sim::synchronize_device("aclrtSynchronizeDeviceWithTimeout", milliseconds);
}

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  const Lock lock;
  if (const aclError error = sim::synchronize_stream(handle, "aclrtStreamQuery")) return error;
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) {
  const Lock lock;
  auto* created = new sim::Event;
  sim::events.insert(created);
  *event = created;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventWithFlag(event, flag);
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
  const Lock lock;
  sim::Event* event;
  if (const aclError error = sim::find_event(handle, &event)) return error;
  sim::events.erase(event);
  delete event;
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event_handle, aclrtStream stream_handle) {
  const Lock lock;
  sim::Event* event;
  sim::Stream* stream;
  if (const aclError error = sim::find_event(event_handle, &event)) return error;
  if (const aclError error = sim::find_stream(stream_handle, &stream)) return error;
  event->recorded = true;
  event->when = sim::Clock::now();
  event->capture = stream->capture;
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent event_handle) {
  const Lock lock;
  sim::Event* event;
  sim::Stream* stream;
  if (const aclError error = sim::find_event(event_handle, &event)) return error;
  if (const aclError error = sim::find_stream(stream_handle, &stream)) return error;
  if (event->capture != nullptr) stream->capture = event->capture;
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream) {
  const Lock lock;
  sim::Event* event;
  if (const aclError error = sim::find_event(handle, &event)) return error;
  event->recorded = false;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  const Lock lock;
  sim::Event* event;
  if (const aclError error = sim::find_event(handle, &event)) return error;
  if (event->capture == nullptr) return ACL_SUCCESS;
  return sim::fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event belongs to a stream being captured");
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  const Lock lock;
  sim::Event* event;
  if (const aclError error = sim::find_event(handle, &event)) return error;
  // An event that was never recorded counts as complete, as in every runtime of this kind.
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  const Lock lock;
  sim::Event* event;
  if (const aclError error = sim::find_event(handle, &event)) return error;
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start_handle,
                               aclrtEvent end_handle) {
  const Lock lock;
  sim::Event* start;
  sim::Event* end;
  if (const aclError error = sim::find_event(start_handle, &start)) return error;
  if (const aclError error = sim::find_event(end_handle, &end)) return error;
  if (!start->recorded || !end->recorded) {
    return sim::fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "an event was never recorded");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->when - start->when).count();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  const Lock lock;
  sim::Stream* stream;
  if (const aclError error = sim::find_stream(handle, &stream)) return error;
  if (const aclError error = sim::check_not_captured(*stream, "aclmdlRICaptureBegin")) return error;
  stream->capture = new sim::Graph{.tasks = {}, .id = ++sim::graphs_so_far};
  stream->began_capture = true;
  sim::graphs.insert(stream->capture);
  sim::capture_mode = mode;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status,
                                aclmdlRI* graph) {
  const Lock lock;
  sim::Stream* stream;
  if (const aclError error = sim::find_stream(handle, &stream)) return error;
  *status = stream->capture == nullptr ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
                                       : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  *graph = stream->capture;
  return ACL_SUCCESS;
}

aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  const Lock lock;
  sim::Graph* graph;
  if (const aclError error = sim::find_graph(handle, &graph)) return error;
  *id = graph->id;
  return ACL_SUCCESS;
}

// The mode of this thread's calls during a capture: the old one comes back.
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, sim::capture_mode);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* graph) {
  const Lock lock;
  sim::Stream* stream;
  if (const aclError error = sim::find_stream(handle, &stream)) return error;
  if (!stream->began_capture) {
    return sim::fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "no capture began in this stream");
  }
  *graph = stream->capture;
  stream->began_capture = false;
  for (sim::Stream* joined : sim::streams) {
    if (joined->capture == *graph) joined->capture = nullptr;
  }
  for (sim::Event* event : sim::events) {
    if (event->capture == *graph) event->capture = nullptr;
  }
  sim::capture_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  const Lock lock;
  sim::Graph* graph;
  if (const aclError error = sim::find_graph(handle, &graph)) return error;
  return sim::submit(stream, [graph]() -> aclError {
    for (const sim::Task& task : graph->tasks) {
      if (const aclError error = task()) return error;
    }
    return ACL_SUCCESS;
  });
}

aclError aclmdlRIDestroy(aclmdlRI handle) {
  const Lock lock;
  sim::Graph* graph;
  if (const aclError error = sim::find_graph(handle, &graph)) return error;
  sim::graphs.erase(graph);
  delete graph;
  return ACL_SUCCESS;
}

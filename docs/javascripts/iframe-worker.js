// A page that is opened from a file may not start a worker: run the worker's script in a hidden frame, so that the search works.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      this.frame.srcdoc = `<script>var postMessage = (data) => parent.postMessage(data, "*")</script><script src="${url}"></script>`;
      window.addEventListener("message", (event) => {
        if (event.source === this.frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
